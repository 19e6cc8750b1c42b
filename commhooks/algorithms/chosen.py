"""The reduction of entries that all ranks have chosen alike: without indices, so that they can be all-reduced."""

from typing import NamedTuple

import torch
from torch import Tensor

from commhooks import ops
from commhooks.algorithms.packing import Packing
from commhooks.bucket import Bucket
from commhooks.comm import Comm
from commhooks.state import HookState


class Reduced(NamedTuple):
    """What has become of M and of the riders. `riding_rest` is None where riders are sent exactly."""

    mean: Tensor
    mean_riding: Tensor
    rest: Tensor  # what of M was not sent
    riding_rest: Tensor | None
    worst: Tensor  # the largest magnitude received


async def reduce_chosen(
    places: Tensor, m: Tensor, riding: Tensor, wire_dtype: torch.dtype, comm: Comm, scale: Tensor | None = None
) -> Reduced:
    """The mean over ranks of M at `places` (times `scale`), zero elsewhere, and of the riders.

    What is not finite in any rank's M, sent or not, makes all of the mean so.

    Args:
        places: int64 indices into M, different ones, the same on every rank.
        m: (numel,), becomes `rest`.
        riding: the riders, packed.
    """
    unseen = ops.largest(m)[None].to(m.dtype) * 0  # 0, or NaN
    local = torch.cat([m[places], riding, unseen])
    wire = local.div(comm.world_size).to(wire_dtype)
    sent = wire.to(m.dtype).mul(comm.world_size)
    received = (await comm.all_reduce(wire, last=True)).to(m.dtype)
    worst = ops.largest(received)
    entries, rode, unseen = received.split([len(places), len(riding), 1])
    rest, riding_rest, _ = local.sub_(sent).split([len(places), len(riding), 1])
    m[places] = rest
    mean = torch.zeros_like(m)
    mean[places] = (entries if scale is None else entries * scale) + unseen
    return Reduced(mean, rode, m, riding_rest, worst)


async def reduce_riders(m: Tensor, riding: Tensor, comm: Comm) -> Reduced:
    """Of a bucket in which nothing is compressed: the exact mean of its riders; M is empty."""
    mean = await comm.all_reduce(riding.div_(comm.world_size), last=True)
    return Reduced(m, mean, m, None, ops.largest(mean))


def settle(state: HookState, bucket: Bucket, packing: Packing, reduced: Reduced) -> None:
    """The bucket becomes the mean, and what was not sent the next step's residual."""
    state.received(reduced.worst)
    packing.scatter_(reduced.mean, reduced.mean_riding, bucket.buffer)
    state.received_result(bucket.buffer)
    residual = state.next_residual(bucket)
    if residual is not None:
        riding_rest = torch.zeros_like(reduced.mean_riding) if reduced.riding_rest is None else reduced.riding_rest
        packing.scatter_(reduced.rest, riding_rest, residual)
