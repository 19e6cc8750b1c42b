"""Casting with error feedback: residual add, scale, round and what is left over, in one pass; and the way back.

Source: error feedback as in arXiv:1901.09847 (EF-SGD), with rounding for the compressor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from commhooks.triton_kernels.reference import FLOATS, check
from commhooks.triton_kernels.rounding import LAUNCH, round_to, widen

# 16 elements a thread of 4 warps, 8 on AMD with its warps of 64: loads of 16 bytes even of bfloat16. And still 128
# programs of a 1 MB bucket, to occupy the multiprocessors.
BLOCK = 2048
WARPS = 4


@triton.jit
def _to_wire(gradient, residual, wire, rest, numel, divisor, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Only the last block is masked: a mask that `numel` may cut anywhere forbids wide loads.
    if start + BLOCK <= numel:
        _to_wire_block(gradient, residual, wire, rest, start, numel, divisor, HAS_RESIDUAL, BLOCK, False)
    else:
        _to_wire_block(gradient, residual, wire, rest, start, numel, divisor, HAS_RESIDUAL, BLOCK, True)


@triton.jit
def _to_wire_block(
    gradient, residual, wire, rest, start, numel, divisor,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    i = start + tl.arange(0, BLOCK)
    inside = i < numel if MASKED else None
    m = widen(tl.load(gradient + i, inside))
    if HAS_RESIDUAL:
        m += tl.load(residual + i, inside)
    rounded = round_to(tl.div_rn(m, divisor), wire.dtype.element_ty)
    tl.store(wire + i, rounded, inside)
    if HAS_RESIDUAL:
        tl.store(rest + i, m - widen(rounded) * divisor, inside)


@triton.jit
def _from_wire(wire, out, numel, divisor, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= numel:
        _from_wire_block(wire, out, start, numel, divisor, BLOCK, False)
    else:
        _from_wire_block(wire, out, start, numel, divisor, BLOCK, True)


@triton.jit
def _from_wire_block(wire, out, start, numel, divisor, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    inside = i < numel if MASKED else None
    x = tl.div_rn(widen(tl.load(wire + i, inside)), divisor)
    tl.store(out + i, round_to(x, out.dtype.element_ty), inside)


def to_wire(
    gradient: Tensor, residual: Tensor | None, divisor: float, dtype: torch.dtype, rest: Tensor | None
) -> Tensor:
    """wire = (gradient + residual) / divisor, rounded to nearest even into `dtype`; NaN stays NaN.

    With gradient [1.0, 257.0], residual [0.5, 1.0], divisor 1, bfloat16: wire [1.5, 258.0], rest [0, 0];
    without the residual 257 becomes 256 (bfloat16 has 8 bits; a tie goes to even).

    Args:
        gradient: (numel,), float32, bfloat16 or float16.
        residual: (numel,), float32, or None.
        divisor: divided by in float32.
        dtype: float32, bfloat16 or float16.
        rest: (numel,), float32, overwritten by what of the sum the wire does not carry; None without a residual.

    Returns:
        The wire tensor (numel,).

    Raises:
        ValueError: a tensor is of another dtype, not contiguous, or of another length; the message names it.

    Bytes an element, float32 to bfloat16: 14 with a residual (two reads, the wire, the rest), 6 without. No fewer are
    possible.
    """
    numel = gradient.numel()
    check("gradient", gradient, FLOATS, numel)
    check("residual", residual, (torch.float32,), numel)
    check("rest", rest, (torch.float32,), numel)
    if (residual is None) != (rest is None):
        raise ValueError("residual, rest: one of them is None; they must be given together")
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}; it must be one of {FLOATS}")
    wire = torch.empty(numel, dtype=dtype, device=gradient.device)
    if numel:
        grid = (triton.cdiv(numel, BLOCK),)
        _to_wire[grid](
            gradient,
            residual,
            wire,
            rest,
            numel,
            float(divisor),
            residual is not None,
            BLOCK,
            **LAUNCH,
            num_warps=WARPS,
        )
    return wire


def from_wire_(wire: Tensor, divisor: float, out: Tensor) -> None:
    """out = wire / divisor, in out's dtype.

    With wire [3.0, 5.0] and divisor 2: out [1.5, 2.5].

    Args:
        wire: (numel,), float32, bfloat16 or float16.
        divisor: divided by in float32.
        out: (numel,), float32, bfloat16 or float16: overwritten.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous, or of another length; the message names it.

    Bytes an element, bfloat16 to float32: 6.
    """
    numel = wire.numel()
    check("wire", wire, FLOATS, numel)
    check("out", out, FLOATS, numel)
    if numel:
        _from_wire[(triton.cdiv(numel, BLOCK),)](wire, out, numel, float(divisor), BLOCK, **LAUNCH, num_warps=WARPS)
