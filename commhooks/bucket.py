"""A bucket: one flat gradient buffer, and where in it each parameter's gradient lies."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """One parameter's gradient in the flat buffer: elements [offset, offset + numel), of the given shape.

    `key` tells the parameter from all others of the model: the Parameter itself under DDP, a name in a simulation.
    """

    key: Hashable
    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True, eq=False)
class Layout:
    """The parameters of one bucket in their order. One object as long as that stays: compare with `is`."""

    index: int
    slices: tuple[Slice, ...]

    @cached_property
    def keys(self) -> tuple[Hashable, ...]:
        """The parameters' keys, in their order."""
        return tuple(x.key for x in self.slices)

    @cached_property
    def numels(self) -> list[int]:
        """How many elements each parameter has: `flat.split(layout.numels)` cuts a bucket."""
        return [x.numel for x in self.slices]

    def holds(self, keys: Sequence[Hashable]) -> bool:
        """Are these, in this order, the bucket's parameters?"""
        return len(keys) == len(self.slices) and all(
            key is slice_.key for key, slice_ in zip(keys, self.slices, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Bucket:
    """What a hook call is about. `buffer` is this rank's gradient, and in the end the mean over all ranks."""

    layout: Layout
    buffer: Tensor
    is_last: bool

    @property
    def index(self) -> int:
        return self.layout.index


def lay_out(index: int, parameters: Sequence[tuple[Hashable, str, tuple[int, ...]]]) -> Layout:
    """The layout of parameters (key, name, shape) packed one behind the other."""
    slices: list[Slice] = []
    offset = 0
    for key, name, shape in parameters:
        slices.append(Slice(key, name, offset, shape))
        offset += slices[-1].numel
    return Layout(index, tuple(slices))
