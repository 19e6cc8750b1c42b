"""The reduction of entries that all ranks have chosen alike: without indices, so that they can be all-reduced."""

import torch
from torch import Tensor

from commhooks import ops
from commhooks.algorithms.riders import Riders
from commhooks.comm import Comm


async def reduce_chosen(
    places: Tensor,
    m: Tensor,
    riding: Tensor,
    riders: Riders,
    out: Tensor,
    residual: Tensor | None,
    wire_dtype: torch.dtype,
    comm: Comm,
    scale: Tensor | None = None,
) -> Tensor:
    """out = the mean of M at `places` (times `scale`), zero elsewhere; residual = what of M was not sent.

    Args:
        places: int64 indices into M, different ones, the same on every rank.
        m: gradient + residual without its riders. It may be `out` itself.
        riding: the riders of M, packed.

    Returns:
        The largest magnitude received; not finite, like the result, if any of any rank's M is not, sent or not.
    """
    unseen = ops.largest(m)[None].to(m.dtype) * 0  # 0, or NaN
    local = torch.cat([m[places], riding, unseen])
    wire = local.div(comm.world_size).to(wire_dtype)
    sent = wire.to(m.dtype).mul(comm.world_size)
    mean = (await comm.all_reduce(wire)).to(m.dtype)
    worst = ops.largest(mean)
    entries, rode, unseen = mean.split([len(places), len(riding), 1])
    if residual is not None:
        rest = local.sub_(sent)
        m[places] = rest[: len(places)]
        riders.put_(rest[len(places) : -1], m)
        ops.keep_(residual, m, worst)
    out.zero_()
    out[places] = ((entries if scale is None else entries * scale) + unseen).to(out.dtype)
    riders.put_(rode, out)
    return worst
