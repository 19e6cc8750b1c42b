"""Parameters that no rank has used in a step: what they are owed waits for one in which some rank does."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commhooks.bucket import Bucket
from commhooks.comm import Comm

if TYPE_CHECKING:
    from commhooks.state import HookState
    from commhooks.tracking import Algorithm


async def spare_unused(algorithm: "Algorithm", state: "HookState", bucket: Bucket, comm: Comm) -> Tensor:
    """The algorithm, as if the bucket's unused parameters were not in it: their mean is zero, all memories stay.

    With `find_unused_parameters`, DDP throws away what a hook gives for a parameter that no rank has used, and with it
    what was sent of its residual. Unused is what has a gradient of zeros on every rank; to know that takes one more
    all-reduce, of a number a parameter. It comes last, so that what compression sends does not wait for it.
    """
    numels = bucket.layout.numels
    used = torch.stack([x.any() for x in bucket.buffer.split(numels)])  # (parameters,)
    result = await algorithm(state, bucket, replace(comm, more_follows=True))
    unused = await comm.all_reduce(used.float(), last=True) == 0
    if unused.is_cuda or unused.any():  # to ask a GPU would be to wait for it
        for memory in (state.own | state.common).values():
            memory.keep(bucket, unused)
        for mean, is_unused in zip(result.split(numels), unused.unbind(), strict=True):
            mean.masked_fill_(is_unused, 0)
    return result
