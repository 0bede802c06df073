"""Digests of KV blocks: 64-bit xxHash3, bound to the request, the attempt and the block's place.

A digest of the right bytes in the wrong place is a wrong digest, so a block of another request, an
earlier attempt or a neighbouring position never passes. Detects accidents, not forgery.
Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from core.messages import TransferId

Blocks = npt.NDArray[np.uint8]  # [num_blocks, block_bytes], the whole pool of one worker


def block_digest(transfer: TransferId, index: int, block: npt.NDArray[np.uint8]) -> int:
    """The digest of prompt block `index`; `block` is uint8 [block_bytes], contiguous."""
    return xxhash.xxh3_64_intdigest(block.data, seed=block_seed(transfer, index))


def block_seed(transfer: TransferId, index: int) -> int:
    """What binds a digest to its place."""
    return xxhash.xxh3_64_intdigest(f"{transfer}/{index}".encode())


def block_digests(transfer: TransferId, pool: Blocks, block_ids: Iterable[int]) -> tuple[int, ...]:
    """Digests of the blocks in the order of the prompt. Releases the GIL while it reads."""
    return tuple(block_digest(transfer, i, pool[b]) for i, b in enumerate(block_ids))
