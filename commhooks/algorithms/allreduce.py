"""Exact mean by one all-reduce: the base line, and the warm-up of every other algorithm."""

from torch import Tensor

from commhooks.bucket import Bucket
from commhooks.comm import Comm
from commhooks.state import HookState


async def allreduce(state: HookState, bucket: Bucket, comm: Comm) -> Tensor:  # noqa: ARG001 - as every algorithm
    """buffer = sum over ranks of buffer / W, in the gradient's dtype; any dtype and layout that the group reduces."""
    # Divided first: the sum of half-precision gradients may overflow where their mean does not.
    return await comm.all_reduce(bucket.buffer.div_(comm.world_size))
