"""64-bit xxHash3 of blocks on a GPU, a program for each: the same numbers as the host's.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import triton
import triton.language as tl


@triton.jit
def _stripes(block, secret, first, num_stripes, lane):
    """What stripes add to the accumulators: of 16, of eight words each, the first `num_stripes`."""
    stripe = tl.arange(0, 16)
    there = (stripe < num_stripes)[:, None]
    at = block + first * 8 + stripe[:, None] * 8
    word = tl.load(at + lane[None, :], mask=there, other=0).to(tl.uint64, bitcast=True)
    beside = tl.load(at + (lane ^ 1)[None, :], mask=there, other=0).to(tl.uint64, bitcast=True)
    key = word ^ tl.load(secret + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
    product = (key & 0xFFFFFFFF) * (key >> 32)
    return tl.sum(tl.where(there, product + beside, 0), axis=0)


@triton.jit
def accumulate(
    blocks,  # int64 [n, words]: the bytes of a block, eight at a time
    secrets,  # int64 [n, 24]
    start,  # int64 [8]
    out,  # int64 [n, 8]
    words,
    PRIME: tl.constexpr,
):
    """One program: the eight accumulators of one block, but for what `core.xxh3.finish` does."""
    row = tl.program_id(0).to(tl.int64)
    block, secret = blocks + row * words, secrets + row * 24
    lane = tl.arange(0, 8)
    sums = tl.load(start + lane).to(tl.uint64, bitcast=True)
    scramble = tl.load(secret + 16 + lane).to(tl.uint64, bitcast=True)
    # Of the last byte nothing is said: the last stripe has it, and the last but one may not.
    num_rounds = (words * 8 - 1) // 1024
    for turn in range(0, num_rounds):
        sums += _stripes(block, secret, turn * 16, 16, lane)
        sums = (sums ^ (sums >> 47) ^ scramble) * PRIME
    rest = (words * 8 - 1 - num_rounds * 1024) // 64
    sums += _stripes(block, secret, num_rounds * 16, rest, lane)
    # The last 64 bytes, with the secret seven bytes before its end.
    last = block + words - 8
    word = tl.load(last + lane).to(tl.uint64, bitcast=True)
    beside = tl.load(last + (lane ^ 1)).to(tl.uint64, bitcast=True)
    low = tl.load(secret + 15 + lane).to(tl.uint64, bitcast=True) >> 8
    key = word ^ (low | (scramble << 56))
    sums += beside + (key & 0xFFFFFFFF) * (key >> 32)
    tl.store(out + row * 8 + lane, sums.to(tl.int64, bitcast=True))
