"""Attention of single tokens to their paged contexts, split over the context's length.

The softmax is computed online, tile by tile; the parts of a context are computed by programs of
their own and put together by the logarithms of their sums. Sources: Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867; Dao et al., Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html; Kwon et al., PagedAttention,
https://arxiv.org/abs/2309.06180.
"""

import triton
import triton.language as tl

from engine.triton.fp8_heads import load_heads
from engine.triton.numbers import narrow


@triton.jit
def paged_decode(
    qkv,  # [tokens, (H + 2 K) * D]: queries, turned
    pool,  # one layer's [num_blocks, 2, block_size, K, WIDTH] by its strides
    tokens,  # int32 [seqs]: each one's row in qkv
    block_table,  # int32 [seqs, table_width]
    context_lens,  # int32 [seqs]; 0: nobody's row
    part,  # float32 [seqs, H, splits, D]: results of parts of contexts
    part_lse,  # float32 [seqs, H, splits]: base-2 logarithms of their sums
    scale,  # of the scores, times log2(e)
    table_width,
    block_stride,
    value_offset,
    num_splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # of a head in the pool: D, or with its scale behind it
    FP8: tl.constexpr,
    GROUP: tl.constexpr,  # a power of two that holds H / K
    TILE: tl.constexpr,  # tokens at a time
    DIMS: tl.constexpr,  # a power of two that holds D
    OPERAND: tl.constexpr,  # what is multiplied
):
    """One program: the query heads of one KV head, for one part of one sequence's context."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    # Parts are whole tiles, alike up to one tile.
    length = tl.cdiv(tl.cdiv(context_len, TILE), num_splits) * TILE
    begin = split * length
    end = tl.minimum(begin + length, context_len)
    in_group = tl.arange(0, GROUP)
    head = kv_head * (H // K) + in_group
    dim = tl.arange(0, DIMS)
    wanted = (in_group < H // K)[:, None] & (dim < D)[None, :]
    token = tl.load(tokens + seq).to(tl.int64)
    query_ptr = qkv + token * ((H + 2 * K) * D) + head[:, None] * D + dim[None, :]
    query = tl.load(query_ptr, mask=wanted, other=0.0).to(OPERAND)
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, DIMS), tl.float32)
    for position in range(begin, end, TILE):
        place = position + tl.arange(0, TILE)
        there = place < end
        block = tl.load(
            block_table + seq.to(tl.int64) * table_width + place // BLOCK_SIZE, mask=there, other=0
        ).to(tl.int64)
        row = block * block_stride + (place % BLOCK_SIZE) * (K * WIDTH) + kv_head * WIDTH
        key_ptr = pool + row
        key = load_heads(key_ptr, dim, there, D, FP8, OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        fade = tl.exp2(best - new_best)
        value = load_heads(key_ptr + value_offset, dim, there, D, FP8, OPERAND)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(OPERAND), value, input_precision="ieee")
        best = new_best
    # A part without tokens has no sum: its logarithm is minus infinity, and it weighs nothing.
    empty = total == 0.0
    result = mixed / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), best + tl.log2(tl.where(empty, 1.0, total)))
    row = (seq.to(tl.int64) * H + head) * num_splits + split
    tl.store(part_lse + row, lse, mask=in_group < H // K)
    tl.store(part + row[:, None] * D + dim[None, :], result, mask=wanted)


@triton.jit
def reduce_parts(
    part,  # float32 [seqs, H, splits, D]
    part_lse,  # float32 [seqs, H, splits]
    tokens,
    out,  # [tokens, H * D]; zeros where there is no context
    num_splits,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two that holds num_splits
    DIMS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """One program: one head of one sequence."""
    seq, head = tl.program_id(0), tl.program_id(1)
    dim, split = tl.arange(0, DIMS), tl.arange(0, SPLITS)
    row = (seq.to(tl.int64) * H + head) * num_splits + split
    lse = tl.load(part_lse + row, mask=split < num_splits, other=float("-inf"))
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    parts = tl.load(
        part + row[:, None] * D + dim[None, :],
        mask=(split < num_splits)[:, None] & (dim < D)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    token = tl.load(tokens + seq).to(tl.int64)
    tl.store(
        out + (token * H + head) * D + dim,
        narrow(result, out.dtype.element_ty, BY_BITS),
        mask=dim < D,
    )
