"""Collectives as an algorithm sees them: descriptions to await, and the bytes each one costs.

An algorithm is a coroutine. `await comm.all_reduce(x)` hands an `AllReduce` to whoever drives the coroutine, an
executor or a simulation, which performs it and sends the result back. There is no event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Collective(ABC):
    """A collective on this rank's `tensor`.

    `last`: the algorithm awaits no other one after it. Whoever drives it may let it wait as long as it likes, and on
    each rank differently: no other collective depends on it.
    """

    tensor: Tensor
    last: bool = False

    def __await__(self) -> Generator["Collective", Tensor, Tensor]:
        return (yield self)

    @abstractmethod
    def bytes_sent(self, world_size: int) -> float:
        """Bytes that one of `world_size` ranks puts on the wire, by the ring algorithms that gloo and NCCL use."""


class AllReduce(Collective):
    """The sum over all ranks, in place, in the tensor's dtype."""

    def bytes_sent(self, world_size: int) -> float:
        if self.tensor.layout == torch.sparse_coo:  # gloo gathers every rank's indices and values
            parts = (self.tensor._indices(), self.tensor._values())
            return (world_size - 1) * sum(x.nbytes for x in parts)
        return 2 * (world_size - 1) / world_size * self.tensor.nbytes


class AllGather(Collective):
    """Every rank's tensor (...), as one tensor (world_size, ...)."""

    def bytes_sent(self, world_size: int) -> float:
        return (world_size - 1) * self.tensor.nbytes


class AllToAll(Collective):
    """Row i of the tensor (world_size, ...) goes to rank i; row i of the result came from rank i."""

    def bytes_sent(self, world_size: int) -> float:
        return (world_size - 1) / world_size * self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """Rank `root`'s tensor, into every rank's."""

    root: int = 0

    def bytes_sent(self, world_size: int) -> float:
        """The mean over ranks: every rank but one receives the tensor once."""
        return (world_size - 1) / world_size * self.tensor.nbytes


@dataclass(frozen=True)
class Comm:
    """This rank's place among all ranks, and the collectives it can await.

    `more_follows`: what an algorithm takes for its last collective is not: it is part of another one.
    """

    rank: int
    world_size: int
    more_follows: bool = False

    def all_reduce(self, tensor: Tensor, *, last: bool = False) -> AllReduce:
        return AllReduce(tensor, last and not self.more_follows)

    def all_gather(self, tensor: Tensor, *, last: bool = False) -> AllGather:
        return AllGather(tensor, last and not self.more_follows)

    def all_to_all(self, tensor: Tensor) -> AllToAll:
        return AllToAll(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Broadcast:
        return Broadcast(tensor, root=root)
