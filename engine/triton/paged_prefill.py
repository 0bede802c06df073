"""Causal attention of prompts' chunks to their paged contexts.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, over blocks as in Kwon et al.,
https://arxiv.org/abs/2309.06180.
"""

import triton
import triton.language as tl

from engine.triton.fp8_heads import load_heads
from engine.triton.numbers import narrow


@triton.jit
def paged_prefill(
    qkv,  # [tokens, (H + 2 K) * D]: queries, turned
    pool,  # one layer's [num_blocks, 2, block_size, K, WIDTH] by its strides
    out,  # [tokens, H * D]
    tile_chunk,  # int32 [tiles]: whose rows a tile has
    tile_first,  # int32 [tiles]: its first row, counted within the chunk
    chunk_token,  # int32 [chunks]: the chunk's first row in qkv
    chunk_start,  # int32 [chunks]: that row's position in its sequence
    chunk_len,  # int32 [chunks]
    block_table,  # int32 [chunks, table_width]
    scale,  # of the scores, times log2(e)
    table_width,
    block_stride,
    value_offset,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # of a head in the pool: D, or with its scale behind it
    FP8: tl.constexpr,
    ROWS: tl.constexpr,  # queries of one tile
    TILE: tl.constexpr,  # tokens of the context at a time
    DIMS: tl.constexpr,  # a power of two that holds D
    OPERAND: tl.constexpr,  # what is multiplied
    BY_BITS: tl.constexpr,
):
    """One program: one query head, ROWS queries of one chunk."""
    tile, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (H // K)
    chunk = tl.load(tile_chunk + tile)
    first = tl.load(tile_first + tile)
    row = first + tl.arange(0, ROWS)
    in_chunk = row < tl.load(chunk_len + chunk)
    start = tl.load(chunk_start + chunk)
    position = start + row
    token = (tl.load(chunk_token + chunk) + row).to(tl.int64)
    dim = tl.arange(0, DIMS)
    wanted = in_chunk[:, None] & (dim < D)[None, :]
    query_ptr = qkv + token[:, None] * ((H + 2 * K) * D) + head * D + dim[None, :]
    query = tl.load(query_ptr, mask=wanted, other=0.0).to(OPERAND)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIMS), tl.float32)
    # What the tile's last row sees is all that any of its rows does, and is written by now.
    end = tl.minimum(start + first + ROWS, start + tl.load(chunk_len + chunk))
    table = block_table + chunk.to(tl.int64) * table_width
    for begin in range(0, end, TILE):
        place = begin + tl.arange(0, TILE)
        there = place < end
        block = tl.load(table + place // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        kv_row = block * block_stride + (place % BLOCK_SIZE) * (K * WIDTH) + kv_head * WIDTH
        key_ptr = pool + kv_row
        key = load_heads(key_ptr, dim, there, D, FP8, OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = there[None, :] & (place[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        # Every row sees position 0, so from the first tile on `best` is finite.
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        fade = tl.exp2(best - new_best)
        value = load_heads(key_ptr + value_offset, dim, there, D, FP8, OPERAND)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(OPERAND), value, input_precision="ieee")
        best = new_best
    out_ptr = out + (token[:, None] * H + head) * D + dim[None, :]
    result = narrow(mixed / total[:, None], out.dtype.element_ty, BY_BITS)
    tl.store(out_ptr, result, mask=wanted)
