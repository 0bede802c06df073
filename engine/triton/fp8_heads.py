"""KV heads in FP8 within kernels: the numbers of `engine.fp8_kv`, bit for bit.

By integer arithmetic: GPUs before compute capability 8.9 have no conversions of e4m3, and the
interpreter rounds none.
"""

import triton
import triton.language as tl

from engine.fp8_numbers import LARGEST, LEAST_SCALE

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit
def scale_of(largest):
    """The scale of a head whose largest magnitude this is, float32."""
    scale = tl.maximum(
        tl.div_rn(largest, tl.full(largest.shape, _LARGEST, tl.float32)), _LEAST_SCALE
    )
    return tl.where(largest > 0.0, scale, 1.0)


@triton.jit
def encoded(x):
    """float32 `x`, scaled, as e4m3 in uint8: to the nearest, ties to even; NaN stays."""
    size = tl.minimum(tl.abs(x), _LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    # From 2^-6 on a number has its own exponent, whose bias goes from 127 to 7.
    normal = ((bits + (((bits >> 20) & 1) + 0x7FFFF)) >> 20) - (120 << 3)
    # Below, the sum's last bits count steps of 2^-9.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    return (code | sign).to(tl.uint8)


@triton.jit
def decoded(code):
    """e4m3 in uint8 as float32, exactly."""
    bits = code.to(tl.uint32)
    low = bits & 0x7F
    normal = ((low << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)
    size = tl.where(low == 0x7F, float("nan"), size)
    return tl.where(bits >= 128, -size, size)


@triton.jit
def load_heads(head, dim, there, D: tl.constexpr, FP8: tl.constexpr, OPERAND: tl.constexpr):
    """One head of each of some tokens, [tokens, dims], as what is multiplied; zeros elsewhere.

    `head` points to where each begins, [tokens]; `there` says which are read.
    """
    read = there[:, None] & (dim < D)[None, :]
    numbers = tl.load(head[:, None] + dim[None, :], mask=read, other=0)
    if FP8:
        scale = tl.load((head + D).to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
        return (decoded(numbers) * scale[:, None]).to(OPERAND)
    else:
        return numbers.to(OPERAND)
