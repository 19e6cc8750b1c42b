"""Tensors that belong to parameters, stored flat for each bucket, and renewed by whole steps or not at all."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.bucket import Bucket, Layout, Slice
from commhooks.ops import compute_dtype

Numel = Callable[[Slice], int]
Start = Callable[[Slice, Tensor], object]


class Flat(NamedTuple):
    """One flat tensor for a bucket, and each parameter's piece of it."""

    whole: Tensor
    pieces: tuple[Tensor, ...]


class ParameterMemory:
    """One tensor for each parameter, kept as pieces of one flat tensor for each bucket.

    A step reads `flat` and writes `next`; `commit` makes what was written the memory of the next step, and without it
    nothing has happened. So there are two flat tensors for each bucket, which take turns.

    DDP rebuilds its buckets after the first iteration. When a bucket comes with another layout, its flat tensor is
    laid out anew and every piece is copied from wherever its parameter lay before.

    Args:
        numel: how many elements a parameter has here.
        start: fills a parameter's piece before its first step.

    Attributes:
        pieces: each parameter's tensor, flat, by the parameter's key.
    """

    def __init__(self, numel: Numel, start: Start) -> None:
        self.pieces: dict[Hashable, Tensor] = {}
        self._numel, self._start = numel, start
        self._homes: dict[Hashable, Layout] = {}  # whose flat tensor a parameter's piece lies in
        self._flat: dict[Layout, Flat] = {}
        self._spare: dict[Layout, Flat] = {}
        self._written: set[Layout] = set()  # whose spare tensor this step has written
        self._loaded: dict[str, Tensor] = {}  # by the parameter's name, until it comes

    def flat(self, bucket: Bucket) -> Tensor:
        """The bucket's flat tensor, made of each parameter's piece in their order. Only to be read."""
        layout = bucket.layout
        if layout not in self._flat:
            self._flat[layout] = self._cut(layout, lay_out_flat(bucket, self._numel, self._move))
            self._enter(layout)
            self._homes |= dict.fromkeys(layout.keys, layout)
        return self._flat[layout].whole

    def next(self, bucket: Bucket) -> Tensor:
        """The same for the next step: to be written, as a whole."""
        flat, layout = self.flat(bucket), bucket.layout
        if layout not in self._spare:
            self._spare[layout] = self._cut(layout, torch.empty_like(flat))
        self._written.add(layout)
        return self._spare[layout].whole

    def is_written(self, bucket: Bucket) -> bool:
        """Has this step written the bucket's `next`?"""
        return bucket.layout in self._written

    def pieces_of(self, bucket: Bucket, *, after: bool) -> tuple[Tensor, ...]:
        """The bucket's pieces, in the order of its parameters: as kept, or as written for the next step."""
        self.flat(bucket)
        return (self._spare if after else self._flat)[bucket.layout].pieces

    def keep(self, bucket: Bucket, kept: Tensor) -> None:
        """What was written for these parameters of the bucket, bool (parameters,), does not count."""
        if self.is_written(bucket):
            before, after = (self.pieces_of(bucket, after=x) for x in (False, True))
            for old, new, is_kept in zip(before, after, kept.unbind(), strict=True):
                torch.where(is_kept, old, new, out=new)

    def commit(self) -> None:
        """What was written since the last `commit` or `discard` counts."""
        for layout in self._written:
            self._flat[layout], self._spare[layout] = self._spare[layout], self._flat[layout]
            self._enter(layout)
        self._written.clear()

    def discard(self) -> None:
        """What was written since the last `commit` or `discard` does not count."""
        self._written.clear()

    def mul_(self, factor: float | Tensor) -> None:
        tensors = [*self.pieces.values(), *self._loaded.values()]
        if tensors:
            torch._foreach_mul_(tensors, factor)

    def state_dict(
        self, parameters: Iterable[Slice], dtypes: Mapping[str, torch.dtype], device: torch.device
    ) -> dict[str, Tensor]:
        """A copy of each parameter's tensor, by its name; of those that did not come yet, what they will start with."""
        saved = {}
        for x in parameters:
            if x.key in self.pieces:
                saved[x.name] = self.pieces[x.key].clone()
            elif numel := self._numel(x):
                saved[x.name] = torch.empty(numel, dtype=compute_dtype(dtypes[x.name]), device=device)
                self._fill(x, saved[x.name])
        return {name: x for name, x in saved.items() if x.numel()}

    def hand_over(self, parameters: Iterable[Slice]) -> None:
        """Start again, with what there is, for other parameters of these names."""
        self.load_state_dict({x.name: self.pieces[x.key] for x in parameters if x.key in self.pieces})

    def load_state_dict(self, saved: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Start again, with copies of these, on the device if one is given."""
        copies = {name: x.to(device, copy=True) for name, x in saved.items()}
        for held in (self.pieces, self._homes, self._flat, self._spare, self._written):
            held.clear()
        self._loaded = copies

    def _cut(self, layout: Layout, whole: Tensor) -> Flat:
        return Flat(whole, whole.split([self._numel(x) for x in layout.slices]))

    def _enter(self, layout: Layout) -> None:
        self.pieces.update(zip(layout.keys, self._flat[layout].pieces, strict=True))

    def _move(self, parameter: Slice, piece: Tensor) -> None:
        key = parameter.key
        if key not in self.pieces:
            self._fill(parameter, piece)
            self._loaded.pop(parameter.name, None)
            return
        piece.copy_(self.pieces[key])
        home = self._homes[key]  # no longer whole
        self._flat.pop(home, None)
        self._spare.pop(home, None)

    def _fill(self, parameter: Slice, piece: Tensor) -> None:
        loaded = self._loaded.get(parameter.name)
        if loaded is None:
            self._start(parameter, piece)
        else:
            piece.copy_(loaded)
            if loaded.is_cuda:  # made on another stream, and let go of after this
                loaded.record_stream(torch.cuda.current_stream(loaded.device))


def lay_out_flat(bucket: Bucket, numel: Numel, fill: Start) -> Tensor:
    """A flat tensor of `numel(parameter)` elements for each parameter, in their order, each piece filled by `fill`."""
    numels = [numel(x) for x in bucket.layout.slices]
    flat = torch.empty(sum(numels), dtype=compute_dtype(bucket.buffer.dtype), device=bucket.buffer.device)
    for parameter, piece in zip(bucket.layout.slices, flat.split(numels), strict=True):
        fill(parameter, piece)
    return flat
