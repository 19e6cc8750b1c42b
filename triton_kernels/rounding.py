"""What kernels share: rounding that is exact on a GPU and in Triton's interpreter alike, and options of launches."""

import triton
import triton.language as tl

# Options of every launch. All kernels may round a * b + c once; Triton 3.10 will not do so by default, and 3.9 warns of
# that.
LAUNCH = {"enable_fp_fusion": True}


@triton.jit
def widen(x):
    """`x`, bfloat16, float16 or float32, as float32: exact. The interpreter's own way loses bfloat16's denormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


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
