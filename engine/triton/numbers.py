"""Float types in kernels: what the interpreter does not round, and cannot multiply."""

import triton
import triton.language as tl


@triton.jit
def narrow(x, DTYPE: tl.constexpr, BY_BITS: tl.constexpr):
    """float32 `x` as DTYPE, rounded to the nearest, ties to even.

    Triton's interpreter cuts the bits off where bfloat16 is wanted; with BY_BITS they are rounded
    here. NaN stays NaN.
    """
    if BY_BITS and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        quiet = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return quiet.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
