"""Gradients cast to a 16-bit format for the wire."""

from typing import Literal, get_args

import torch
from torch import Tensor, distributed as dist
from typing_extensions import Unpack

from commhooks import ops
from commhooks.algorithms.allreduce import allreduce
from commhooks.bucket import Bucket
from commhooks.comm import Comm
from commhooks.state import HookOptions, HookState, checked_choice

Accumulate = Literal["wire", "fp32"]


class CastState(HookState):
    """Options of `bf16_hook` and `fp16_hook`.

    Args:
        process_group, options: see `HookState`.
        use_error_feedback: add each step's rounding error to the next step's gradient.
        gradient_predivide_factor: f: gradients are divided by f before the sum and by W / f after it. None is W, the
            number of ranks: no sum can overflow, as in torch. A smaller f keeps small fp16 values from vanishing.
        accumulate: "wire" sums in the 16-bit format, hop by hop, as a ring all-reduce does: the error grows with the
            number of ranks. "fp32" sums in float32 and rounds once: an all_to_all and an all_gather of the same
            number of bytes together.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        use_error_feedback: bool = False,
        gradient_predivide_factor: float | None = None,
        accumulate: Accumulate = "wire",
        **options: Unpack[HookOptions],
    ) -> None:
        super().__init__(process_group, **options)
        f = gradient_predivide_factor
        if f is not None and not 0 < f < float("inf"):
            raise ValueError(f"gradient_predivide_factor is {f}; it must be positive and finite, or None")
        self.gradient_predivide_factor = f
        self.accumulate = checked_choice("accumulate", accumulate, get_args(Accumulate))
        self.feed_back(use_error_feedback)

    def config(self) -> dict[str, object]:
        names = ("use_error_feedback", "gradient_predivide_factor", "accumulate")
        return super().config() | {name: getattr(self, name) for name in names}


async def bf16(state: CastState, bucket: Bucket, comm: Comm) -> Tensor:
    """Mean of bfloat16 gradients: the exponent range of float32, 8 bits of precision."""
    return await _cast(state, bucket, comm, torch.bfloat16)


async def fp16(state: CastState, bucket: Bucket, comm: Comm) -> Tensor:
    """Mean of float16 gradients: 11 bits of precision; above 65504 infinite, below 6e-8 zero."""
    return await _cast(state, bucket, comm, torch.float16)


async def _cast(state: CastState, bucket: Bucket, comm: Comm, dtype: torch.dtype) -> Tensor:
    if state.reduces_exactly(bucket):
        return await allreduce(state, bucket, comm)
    residual = state.residual(bucket)
    before = state.gradient_predivide_factor or comm.world_size
    after = comm.world_size / before

    rest = state.next_residual(bucket)
    wire = ops.to_wire(bucket.buffer, residual, before, dtype, rest)
    if state.accumulate == "fp32":
        mean = await _mean_in_fp32(wire, after, rest, comm)
        after = 1
    else:
        mean = await comm.all_reduce(wire, last=True)
    ops.from_wire_(mean, after, bucket.buffer)
    if residual is not None:
        state.received(ops.largest(bucket.buffer))
    return bucket.buffer


async def _mean_in_fp32(wire: Tensor, divisor: float, rest: Tensor | None, comm: Comm) -> Tensor:
    """sum over ranks of wire / divisor, each rank summing its own 1/W of the elements in float32.

    A rank's rounding of its part is an error of the mean, so W times that of its sum: it goes into `rest`.
    """
    world_size, n = comm.world_size, wire.numel()
    part = -(-n // world_size)
    padded = torch.zeros(world_size * part, dtype=wire.dtype, device=wire.device)
    padded[:n] = wire
    received = await comm.all_to_all(padded.view(world_size, part))  # (W, part): my part of every rank
    exact = received.to(torch.float32).sum(0).div_(divisor)  # (part,)
    rounded = exact.to(wire.dtype)
    if rest is not None:
        mine = rest[comm.rank * part : (comm.rank + 1) * part]
        mine.add_((exact - rounded)[: mine.numel()], alpha=world_size)
    return (await comm.all_gather(rounded, last=True)).flatten()[:n]
