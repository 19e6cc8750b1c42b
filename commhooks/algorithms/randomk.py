"""Random-k: entries that all ranks draw alike (arXiv:1809.07599). No index goes over the wire, and values all-reduce.

M = gradient + residual
one entry of each of k strata of every parameter, drawn anew each step
gradient = the mean over ranks of M there; residual = M elsewhere
"""

import zlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed as dist
from typing_extensions import Unpack

from commhooks import ops
from commhooks.algorithms.allreduce import allreduce
from commhooks.algorithms.chosen import reduce_chosen, reduce_riders, settle
from commhooks.algorithms.packing import Packing, PackingByLayout
from commhooks.bucket import Bucket, Slice
from commhooks.comm import Comm
from commhooks.state import HookOptions, HookState, checked_choice, checked_int


class RandomKState(HookState):
    """Options of `randomk_hook`.

    Args:
        process_group, options: see `HookState`.
        density: the fraction of each parameter's entries that is sent; in (0, 1].
        unbiased: multiply what is sent by what it stands for, 1 / density: the result is right in the mean over draws,
            and its variance large. Needs use_error_feedback=False, whose residual is the other way to make up for what
            was not sent.
        use_error_feedback: add to the next gradient what was not sent of this one.
        wire_dtype: of the values: torch.bfloat16, float16 or float32. What rounding takes is fed back.
        random_seed: of the draws; the same on every rank. The global random state is never touched.
        min_numel: parameters of fewer entries than this ride along uncompressed, as vectors always do.

    Raises:
        ValueError, TypeError: an option is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        density: float = 0.01,
        unbiased: bool = False,
        use_error_feedback: bool = True,
        wire_dtype: torch.dtype = torch.bfloat16,
        random_seed: int = 0,
        min_numel: int = 0,
        **options: Unpack[HookOptions],
    ) -> None:
        super().__init__(process_group, **options)
        if not 0 < density <= 1:
            raise ValueError(f"density is {density}; it must be above 0 and at most 1")
        if unbiased and use_error_feedback:
            raise ValueError(
                "unbiased is True; with use_error_feedback=True it must be False: they make up for the same"
            )
        self.density = density
        self.unbiased = unbiased
        self.wire_dtype = checked_choice("wire_dtype", wire_dtype, ops.WIRE_DTYPES)
        self.random_seed = checked_int("random_seed", random_seed, least=0)
        self.min_numel = checked_int("min_numel", min_numel, least=0)
        self.feed_back(use_error_feedback)
        self.packings = PackingByLayout(self.min_numel)
        self._known_strata: WeakKeyDictionary[Packing, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def config(self) -> dict[str, object]:
        names = ("density", "unbiased", "use_error_feedback", "wire_dtype", "random_seed", "min_numel")
        return super().config() | {name: getattr(self, name) for name in names}

    def draw(self, packing: Packing, device: torch.device) -> tuple[Tensor, Tensor]:
        """One index into M of each stratum, int64, and the strata's lengths: the same on every rank."""
        starts, lengths = self._strata(packing, device)
        inside = []
        for parameter, _ in packing.packed:
            # Seeded by the parameter's name: whatever bucket it lies in, the same numbers are drawn for it.
            seed = zlib.crc32(f"{self.random_seed}/{parameter.name}/{self.step}".encode())
            generator = torch.Generator(device).manual_seed(seed)
            strata = self._strata_of(parameter)
            inside.append(torch.rand(strata, dtype=torch.float64, device=device, generator=generator))
        return starts + (torch.cat(inside) * lengths).long(), lengths

    def _strata_of(self, parameter: Slice) -> int:
        return max(1, round(self.density * parameter.numel))

    def _strata(self, packing: Packing, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the strata of all compressed parameters begin in M, and how long they are."""
        known = self._known_strata.get(packing)
        if known is None:
            starts, lengths = [], []
            for parameter, start in packing.packed:
                strata = self._strata_of(parameter)
                bounds = torch.arange(strata + 1, device=device) * parameter.numel // strata
                starts.append(bounds[:-1] + start)
                lengths.append(bounds.diff())
            known = self._known_strata[packing] = torch.cat(starts), torch.cat(lengths)
        return known


async def randomk(state: RandomKState, bucket: Bucket, comm: Comm) -> Tensor:
    """The mean over all ranks of randomly drawn entries, in place in `bucket.buffer`."""
    packing = state.packings[bucket.layout]
    if state.reduces_exactly(bucket):
        return await allreduce(state, bucket, comm)
    m, riding = packing.gather(bucket.buffer, state.residual(bucket))
    if packing.packed:
        places, lengths = state.draw(packing, m.device)
        scale = lengths.to(m.dtype) if state.unbiased else None
        reduced = await reduce_chosen(places, m, riding, state.wire_dtype, comm, scale)
    else:
        reduced = await reduce_riders(m, riding, comm)
    settle(state, bucket, packing, reduced)
    return bucket.buffer
