"""Top-k: of every gradient the entries of largest magnitude, with error feedback (arXiv:1704.05021, 1809.07599).

    M = gradient + residual
    the k largest entries of every block of M are sent, as values and indices
    gradient = the mean over ranks of what was sent, added up in rank order
    residual = M less what this rank sent

Ranks choose different entries. How their choices are added up is the aggregation:

- "allgather": every rank gets every rank's entries. W - 1 times the bytes of one selection.
- "balanced": each rank adds up one range of blocks (all_to_all), selects again the k largest of every block of the sum,
  and sends those to all (all_gather): twice the bytes of one selection, whatever W is. What the second selection drops
  goes into the residual of the rank that dropped it.
- "leader": one rank chooses for all, another one each step; the values of those entries are all-reduced.

Parameters that are not compressed ride along with their entries.
"""

from dataclasses import replace
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor, distributed as dist
from typing_extensions import Unpack

from commhooks import ops
from commhooks.algorithms.allreduce import allreduce
from commhooks.algorithms.chosen import Reduced, reduce_chosen, reduce_riders, settle
from commhooks.algorithms.packing import PackingByLayout
from commhooks.algorithms.selection import AnySelection, BlockSelection, ExactSelection
from commhooks.bucket import Bucket
from commhooks.comm import Comm
from commhooks.memory import ParameterMemory
from commhooks.state import HookOptions, HookState, checked_choice, checked_int

Selection = Literal["block", "exact"]
Aggregation = Literal["auto", "allgather", "balanced", "leader"]


class TopKState(HookState):
    """Options of `topk_hook`.

    Args:
        process_group, options: see `HookState`.
        density: the fraction of entries that a rank sends; in (0, 1]. 0.01 if neither it nor `k` is given.
        k: instead, how many entries: of every block, or with selection="exact" of every bucket.
        selection: "block" selects from every `block_size` consecutive entries of a parameter, in one pass; "exact"
            from the bucket as a whole.
        block_size: 256 to 8192, a power of two. Up to 256 an index takes 8 bits, else 16; with "exact" always 32.
        aggregation: "allgather", "balanced" or "leader", see the module; "auto" is the one of the first two that sends
            less: "allgather" for two ranks, "balanced" for more. "balanced" needs selection="block".
        wire_dtype: of the values: torch.bfloat16, float16 or float32. What rounding takes is fed back.
        use_error_feedback: add to the next gradient what was not sent of this one. Without it they never are.
        warmup_steps: number of steps after `start_iter` in which the density falls from 1 to its target, by the same
            factor each step (deep gradient compression, arXiv:1712.01887).
        momentum: momentum correction with factor masking (arXiv:1712.01887): gradients are gathered into a velocity
            with this factor before selection, and the velocity of what is sent starts again from zero. Use it with an
            optimizer without momentum, in place of its momentum: entries that wait would else get it too late. 0 is
            none; leave it so with Adam.
        min_numel: parameters of fewer entries than this ride along uncompressed, as vectors always do.

    Raises:
        ValueError, TypeError: an option is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        density: float | None = None,
        k: int | None = None,
        selection: Selection = "block",
        block_size: int = 1024,
        aggregation: Aggregation = "auto",
        wire_dtype: torch.dtype = torch.bfloat16,
        use_error_feedback: bool = True,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        min_numel: int = 0,
        **options: Unpack[HookOptions],
    ) -> None:
        super().__init__(process_group, **options)
        if density is not None and k is not None:
            raise ValueError(f"density is {density} and k is {k}; only one of them may be given")
        if density is not None and not 0 < density <= 1:
            raise ValueError(f"density is {density}; it must be above 0 and at most 1")
        if momentum and self.track_error:
            raise ValueError(f"track_error is True; with momentum={momentum} it must be False")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be at least 0 and below 1")
        self.k = None if k is None else checked_int("k", k, least=1)
        self.density = 0.01 if density is None and k is None else density
        self.selection = checked_choice("selection", selection, get_args(Selection))
        self.block_size = checked_choice("block_size", block_size, ops.BLOCK_SIZES)
        self.aggregation = checked_choice("aggregation", aggregation, get_args(Aggregation))
        if self.selection == "exact" and self.aggregation == "balanced":
            raise ValueError('aggregation is "balanced"; with selection="exact" it must be "allgather" or "leader"')
        self.wire_dtype = checked_choice("wire_dtype", wire_dtype, ops.WIRE_DTYPES)
        self.warmup_steps = checked_int("warmup_steps", warmup_steps, least=0)
        self.momentum = momentum
        self.min_numel = checked_int("min_numel", min_numel, least=0)
        self.feed_back(use_error_feedback)
        if momentum:
            self.own["velocity"] = ParameterMemory(lambda x: x.numel, lambda _, piece: piece.zero_())
        alignment = self.block_size if self.selection == "block" else 1
        self.packings = PackingByLayout(self.min_numel, alignment)

    def config(self) -> dict[str, object]:
        names = (
            "density",
            "k",
            "selection",
            "block_size",
            "aggregation",
            "wire_dtype",
            "use_error_feedback",
            "warmup_steps",
            "momentum",
            "min_numel",
        )
        return super().config() | {name: getattr(self, name) for name in names}

    def count_of(self, numel: int) -> int:
        """k: how many of `numel` entries, a block's or a bucket's, are sent in this step."""
        target = self.k if self.density is None else round(self.density * numel)
        fraction = min(max(1, target or 0), numel) / max(1, numel)
        progress = min(1.0, (self.step - self.start_iter + 1) / (self.warmup_steps + 1))
        return ceil(numel * fraction**progress - 1e-6)  # less what a power of 1 may add

    def aggregation_among(self, world_size: int) -> Aggregation:
        """The aggregation, "auto" resolved: the fewer bytes of (W - 1) and 2 (W - 1) / W selections."""
        if self.aggregation != "auto":
            return self.aggregation
        return "allgather" if world_size <= 2 or self.selection == "exact" else "balanced"

    def select_from(self, numel: int) -> AnySelection:
        """How `numel` entries are selected from in this step."""
        if self.selection == "exact":
            return ExactSelection(numel, self.count_of(numel), self.wire_dtype)
        return BlockSelection(numel, self.count_of(self.block_size), self.wire_dtype, self.block_size)


async def topk(state: TopKState, bucket: Bucket, comm: Comm) -> Tensor:
    """The mean over all ranks of each rank's largest entries, in place in `bucket.buffer`."""
    if state.reduces_exactly(bucket):
        return await allreduce(state, bucket, comm)
    packing = state.packings[bucket.layout]
    velocity = _moved(state, bucket) if state.momentum else None
    m, riding = packing.gather(bucket.buffer if velocity is None else velocity, state.residual(bucket))
    if not packing.packed:
        settle(state, bucket, packing, await reduce_riders(m, riding, comm))
        return bucket.buffer
    selection = state.select_from(packing.numel)
    aggregation = state.aggregation_among(comm.world_size)
    if aggregation == "leader":
        reduced, indices = await _leader(selection, m, riding, comm, leader=state.step % comm.world_size)
    elif aggregation == "balanced":
        assert isinstance(selection, BlockSelection)
        reduced, indices = await _balanced(selection, m, riding, comm)
    else:
        reduced, indices = await _allgather(selection, m, riding, comm)
    settle(state, bucket, packing, reduced)
    if velocity is not None:
        moving, riding = packing.gather(velocity, None)
        packing.scatter_(moving.index_fill_(0, selection.places(indices), 0), riding, velocity)
    return bucket.buffer


def _moved(state: TopKState, bucket: Bucket) -> Tensor:
    """momentum x velocity + gradient, where it is kept for the next step."""
    memory = state.own["velocity"]
    velocity = memory.next(bucket)
    return torch.add(bucket.buffer, memory.flat(bucket), alpha=state.momentum, out=velocity)


async def _allgather(selection: AnySelection, m: Tensor, riding: Tensor, comm: Comm) -> tuple[Reduced, Tensor]:
    """Returns, as every aggregation, also the indices that this rank sent, as bytes."""
    m, packed = selection.select(m, None)
    gathered = await comm.all_gather(torch.cat([packed, riding.view(torch.uint8)]), last=True)  # (W, bytes)
    entries, riders = _split(gathered, selection.nbytes, riding.dtype)  # (W, bytes), (W, riders)
    worst = torch.maximum(ops.largest(selection.values(entries)), ops.largest(riders))
    mean = torch.empty_like(m)
    selection.sum_(entries, comm.world_size, mean)
    return Reduced(mean, riders.sum(0).div_(comm.world_size), m, None, worst), selection.index_bytes(packed)


async def _balanced(selection: BlockSelection, m: Tensor, riding: Tensor, comm: Comm) -> tuple[Reduced, Tensor]:
    m, packed = selection.select(m, None)

    # Each rank adds up its own range of blocks, and of riders.
    size = comm.world_size
    part = selection.part(size)
    per_rank = -(-len(riding) // size)
    padded = torch.cat([riding, riding.new_zeros(size * per_rank - len(riding))]).view(size, per_rank)
    parts = selection.split(packed, part, size)  # (W, bytes)
    received = await comm.all_to_all(torch.cat([parts, padded.view(torch.uint8)], 1))
    entries, riders = _split(received, part.nbytes, riding.dtype)
    total = m.new_zeros(part.numel)
    part.sum_(entries, size, total)

    # The means are selected from once more, and gathered by all.
    start, stop = selection.range_of(comm.rank, size)
    own = replace(selection, numel=stop - start)
    dropped, again = own.select(total[: stop - start], None)
    gathered = await comm.all_gather(
        torch.cat([own.split(again, part, 1)[0], riders.sum(0).div_(size).view(torch.uint8)]), last=True
    )
    entries, riders = _split(gathered, part.nbytes, riding.dtype)
    worst = torch.maximum(ops.largest(part.values(entries)), ops.largest(riders))
    m[start:stop].add_(dropped, alpha=size)  # of the mean, so of the sum W times as much
    mean = torch.empty_like(m)
    selection.sum_(selection.join(entries, part)[None], 1, mean)
    return Reduced(mean, riders.flatten()[: len(riding)], m, None, worst), selection.index_bytes(packed)


async def _leader(
    selection: AnySelection, m: Tensor, riding: Tensor, comm: Comm, *, leader: int
) -> tuple[Reduced, Tensor]:
    if comm.rank == leader:
        _, packed = selection.select(m.clone(), None)
        chosen = selection.index_bytes(packed).clone()  # aligned, and without the values' memory
    else:
        chosen = torch.empty(selection.index_nbytes, dtype=torch.uint8, device=m.device)
    chosen = await comm.broadcast(chosen, leader)
    return await reduce_chosen(selection.places(chosen), m, riding, selection.wire_dtype, comm), chosen


def _split(rows: Tensor, nbytes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of received (W, bytes): the entries, uint8, and the riders behind them (W, riders)."""
    riders = rows[:, nbytes:]
    shape = len(rows), riders.shape[1] // dtype.itemsize
    return rows[:, :nbytes].contiguous(), riders.reshape(-1).view(dtype).view(shape)
