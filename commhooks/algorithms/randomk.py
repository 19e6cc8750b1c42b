"""Random-k: entries that all ranks draw alike (arXiv:1809.07599). No index goes over the wire, and values all-reduce.

M = gradient + residual
one entry of each of k strata of the bucket, drawn anew each step
gradient = the mean over ranks of M there; residual = M elsewhere
"""

import zlib

import torch
from torch import Tensor, distributed as dist

from commhooks import ops
from commhooks.algorithms.allreduce import allreduce
from commhooks.algorithms.chosen import reduce_chosen
from commhooks.algorithms.riders import RidersByLayout
from commhooks.bucket import Bucket
from commhooks.comm import Comm
from commhooks.feedback import ErrorFeedback
from commhooks.state import ExecutorName, HookState, checked_choice, checked_int


class RandomKState(HookState):
    """Options of `randomk_hook`.

    Args:
        process_group, start_iter, executor, stats_logging_frequency: see `HookState`.
        density: the fraction of entries that is sent; in (0, 1].
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
        start_iter: int = 0,
        executor: ExecutorName = "auto",
        stats_logging_frequency: int = 0,
    ) -> None:
        super().__init__(
            process_group,
            start_iter=start_iter,
            executor=executor,
            stats_logging_frequency=stats_logging_frequency,
        )
        if not 0 < density <= 1:
            raise ValueError(f"density is {density}; it must be above 0 and at most 1")
        if unbiased and use_error_feedback:
            raise ValueError(
                "unbiased is True; with use_error_feedback=True it must be False: they make up for the same"
            )
        self.density = density
        self.unbiased = unbiased
        self.use_error_feedback = use_error_feedback
        self.wire_dtype = checked_choice("wire_dtype", wire_dtype, ops.WIRE_DTYPES)
        self.random_seed = checked_int("random_seed", random_seed, least=0)
        self.min_numel = checked_int("min_numel", min_numel, least=0)
        self.feedback = ErrorFeedback()
        self.riders = RidersByLayout(self.min_numel)

    def config(self) -> dict[str, object]:
        names = ("density", "unbiased", "use_error_feedback", "wire_dtype", "random_seed", "min_numel")
        return super().config() | {name: getattr(self, name) for name in names}

    def draw(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """One index of each stratum of the bucket, int64, and the strata's lengths: the same on every rank."""
        numel, device = bucket.buffer.numel(), bucket.buffer.device
        strata = max(1, round(self.density * numel))
        bounds = torch.arange(strata + 1, device=device) * numel // strata
        lengths = bounds.diff()
        seed = zlib.crc32(f"{self.random_seed}/{bucket.layout.slices[0].name}/{self.step}".encode())
        generator = torch.Generator(device).manual_seed(seed)
        inside = torch.rand(strata, dtype=torch.float64, device=device, generator=generator)
        return bounds[:-1] + (inside * lengths).long(), lengths


async def randomk(state: RandomKState, bucket: Bucket, comm: Comm) -> Tensor:
    """The mean over all ranks of randomly drawn entries, in place in `bucket.buffer`."""
    riders = state.riders[bucket.layout]
    if state.reduces_exactly(bucket) or riders.alone:
        return await allreduce(state, bucket, comm)
    residual = state.feedback.residual(bucket) if state.use_error_feedback else None
    m = bucket.buffer.to(ops.compute_dtype(bucket.buffer.dtype))
    if residual is not None:
        m.add_(residual)
    riding = riders.take_(m)
    places, lengths = state.draw(bucket)
    scale = lengths.to(m.dtype) if state.unbiased else None
    await reduce_chosen(places, m, riding, riders, bucket.buffer, residual, state.wire_dtype, comm, scale)
    return bucket.buffer
