"""What is computed row by row: RMSNorm with the residual's addition, SwiGLU."""

import triton
import triton.language as tl

from engine.triton.numbers import narrow


@triton.jit
def rms_norm(
    hidden,  # [rows, columns]
    delta,  # [rows, columns], added to hidden in place
    weight,  # [columns]
    out,  # [rows, columns]
    num_rows,
    columns,
    eps,
    ROWS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,  # a power of two that holds them
    ADDS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    held = (row < num_rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    dtype = hidden.dtype.element_ty
    x = tl.load(hidden + at, mask=held, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(delta + at, mask=held, other=0.0).to(tl.float32)
        summed = narrow(x + more, dtype, BY_BITS)
        tl.store(hidden + at, summed, mask=held)
        x = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / columns + eps)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + at, narrow(x * scale[:, None] * w[None, :], dtype, BY_BITS), mask=held)


@triton.jit
def swiglu(
    gate_up,  # [rows, 2 * inner]
    out,  # [rows, inner]
    size,  # rows * inner
    inner,
    TILE: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """silu(gate) * up. One program: TILE numbers."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    held = index < size
    gate_ptr = gate_up + index + index // inner * inner
    gate = tl.load(gate_ptr, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + inner, mask=held, other=0.0).to(tl.float32)
    # Of the magnitude, so that nothing overflows: 1 / (1 + e^-g) is e^g / (1 + e^g).
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    result = narrow(gate * sigmoid * up, out.dtype.element_ty, BY_BITS)
    tl.store(out + index, result, mask=held)
