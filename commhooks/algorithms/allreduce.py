"""Exact mean by one all-reduce: the base line, and the warm-up of every other algorithm."""

import torch
from torch import Tensor

from commhooks import ops
from commhooks.bucket import Bucket
from commhooks.comm import Comm
from commhooks.state import HookState


async def allreduce(state: HookState, bucket: Bucket, comm: Comm) -> Tensor:
    """buffer = sum over ranks of buffer / W, in the gradient's dtype; any dtype and layout that the group reduces."""
    # Divided first: the sum of half-precision gradients may overflow where their mean does not.
    mean = await comm.all_reduce(bucket.buffer.div_(comm.world_size), last=True)
    if state.has_something_to_lose:
        numbers = mean._values() if mean.is_sparse else mean
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        if numbers.is_floating_point():
            state.received(ops.largest(numbers.flatten()))
    return mean
