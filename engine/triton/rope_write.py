"""From a step's projections to the pool: QK-norm, RoPE, and the cache write by slot mapping."""

import triton
import triton.language as tl

from engine.triton.fp8_heads import encoded, scale_of
from engine.triton.numbers import narrow


@triton.jit
def rope_write(
    qkv,  # [tokens, (H + 2 K) * D]; turned queries are left in it
    pool,  # one layer's [num_blocks, 2, block_size, K, WIDTH] by its strides
    slot_mapping,  # int64 [tokens]: block * BLOCK_SIZE + place; below 0: nothing is written
    cos,  # float32 [tokens, D / 2]
    sin,
    query_norm,  # [D]
    key_norm,
    eps,
    block_stride,
    value_offset,
    num_rows,  # heads of all tokens
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # of a head in the pool: D, or with its scale behind it
    FP8: tl.constexpr,
    ROWS: tl.constexpr,  # heads of one program, of one token or several
    HALF: tl.constexpr,  # a power of two that holds D / 2
    NORMED: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """One program: ROWS heads. Dims i and i + D / 2 of each turn together.

    Source of RoPE: Su et al., https://arxiv.org/abs/2104.09864; of RMSNorm: Zhang and Sennrich,
    https://arxiv.org/abs/1910.07467.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // (H + 2 * K), row % (H + 2 * K)
    dim = tl.arange(0, HALF)
    in_half = dim < D // 2
    in_step = row < num_rows
    held = in_step[:, None] & in_half[None, :]
    dtype = qkv.dtype.element_ty
    first_ptr = qkv + row[:, None] * D + dim[None, :]
    first = tl.load(first_ptr, mask=held, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + D // 2, mask=held, other=0.0).to(tl.float32)
    is_query = (head < H)[:, None]
    is_value = (head >= H + K)[:, None]
    first_turned, second_turned = first, second
    if NORMED:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        query_first = tl.load(query_norm + dim, mask=in_half, other=0.0).to(tl.float32)
        query_second = tl.load(query_norm + D // 2 + dim, mask=in_half, other=0.0).to(tl.float32)
        key_first = tl.load(key_norm + dim, mask=in_half, other=0.0).to(tl.float32)
        key_second = tl.load(key_norm + D // 2 + dim, mask=in_half, other=0.0).to(tl.float32)
        first_turned *= scale * tl.where(is_query, query_first[None, :], key_first[None, :])
        second_turned *= scale * tl.where(is_query, query_second[None, :], key_second[None, :])
    angle = token[:, None] * (D // 2) + dim[None, :]
    c = tl.load(cos + angle, mask=held, other=0.0)
    s = tl.load(sin + angle, mask=held, other=0.0)
    new_first = first_turned * c - second_turned * s
    new_second = second_turned * c + first_turned * s
    new_first = narrow(tl.where(is_value, first, new_first), dtype, BY_BITS)
    new_second = narrow(tl.where(is_value, second, new_second), dtype, BY_BITS)
    tl.store(first_ptr, new_first, mask=held & is_query)
    tl.store(first_ptr + D // 2, new_second, mask=held & is_query)

    slot = tl.load(slot_mapping + token, mask=in_step, other=-1)
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * (K * WIDTH)
    place += tl.where(head >= H + K, value_offset + (head - H - K) * WIDTH, (head - H) * WIDTH)
    kv_ptr = pool + place[:, None] + dim[None, :]
    written = in_step & (head >= H) & (slot >= 0)
    stored = held & written[:, None]
    if FP8:
        first, second = new_first.to(tl.float32), new_second.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
        scale = scale_of(largest)
        over = tl.broadcast_to(scale[:, None], (ROWS, HALF))
        tl.store(kv_ptr, encoded(tl.div_rn(first, over)), mask=stored)
        tl.store(kv_ptr + D // 2, encoded(tl.div_rn(second, over)), mask=stored)
        scale_ptr = (pool + place + D).to(tl.pointer_type(tl.float32))
        tl.store(scale_ptr, scale, mask=written)
    else:
        tl.store(kv_ptr, new_first, mask=stored)
        tl.store(kv_ptr + D // 2, new_second, mask=stored)
