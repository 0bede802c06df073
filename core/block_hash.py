"""Names for KV blocks by content: what a prefix cache looks up, in every process alike.

A full block's hash covers its own tokens and, through the chain, all before it, so equal hashes
mean equal KV. Hashes are keyed with a secret of the cluster: nobody outside can compute one. The
chain begins with a salt, and those who use different salts never share a block, so that the time to
first token tells no tenant what another has asked.
"""

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 16
_SHORT_BYTES = 8


class BlockHasher:
    """BLAKE2b (RFC 7693), keyed, 16 bytes, chained block by block."""

    def __init__(self, secret: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._key = hmac.digest(secret, b"tandem prefix cache", "sha256")

    def chain(
        self, token_ids: Sequence[int], salt: str = "", known: Sequence[bytes] = ()
    ) -> tuple[bytes, ...]:
        """The hash of every full block of `token_ids`. `known` are those of its first blocks."""
        hashes = list(known)
        first = len(hashes) * self.block_size
        data = np.asarray(token_ids[first:], dtype="<i4").tobytes()
        parent = hashes[-1] if hashes else self._hash(b"salt", salt.encode())
        size = 4 * self.block_size
        for end in range(size, len(data) + 1, size):
            parent = self._hash(parent, data[end - size : end])
            hashes.append(parent)
        return tuple(hashes)

    def _hash(self, parent: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(parent + data, digest_size=HASH_BYTES, key=self._key).digest()


def short(block_hash: bytes) -> int:
    """The hash as the scheduler knows it: its first eight bytes.

    Two blocks that share them cost a poor placement at most, never a wrong answer.
    """
    return int.from_bytes(block_hash[:_SHORT_BYTES], "little")
