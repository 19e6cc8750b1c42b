"""Conversions that are exact on a GPU and in Triton's interpreter alike."""

import triton
import triton.language as tl


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Float32 `x` rounded to nearest even into `dtype`; NaN stays NaN.

    bfloat16 by integer arithmetic: the interpreter truncates where a GPU rounds.

    >>> 0x3F80_8000 (1 + 2^-8, a tie) becomes 0x3F80 (1.0, even); 0x3F81_8000 becomes 0x3F82
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40  # else a NaN whose payload lies in the low bits would become infinite
        return tl.where(x != x, quiet_nan, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
