"""KV in FP8: each head of each token with a scale of its own, which lies behind its numbers.

Keys (turned by RoPE already) and values are rounded once, when they are written; everybody who
reads them, in the same step or on another worker, reads the rounded ones. A scale for a whole block
would depend on which tokens were there when it was chosen, and so on how a prompt was cut into
chunks. And since a head brings its scale along, blocks are copied, digested, cached and cut by
heads as bytes, as any others are. This is the definition; kernels are checked against it.
"""

import torch
from torch import Tensor

from engine.fp8_numbers import FP8, quantise

SCALE_BYTES = 4  # a float32
# So that scales lie at multiples of their size.
HEAD_DIM_MULTIPLE = 4


def pack(heads: Tensor) -> Tensor:
    """Heads [..., D], float32 or bfloat16, as they are stored: uint8 [..., D + SCALE_BYTES]."""
    numbers, scales = quantise(heads)
    return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


def unpack(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack` has made, as heads [..., D] of `dtype`. The product is rounded to it once."""
    numbers, scales = stored.split((stored.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    exact: Tensor = numbers.view(FP8).float() * scales.contiguous().view(torch.float32)
    return exact.to(dtype)
