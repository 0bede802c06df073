"""64-bit xxHash3 of long inputs for those who compute it elsewhere: constants, seeded secret, end.

On a host the package `xxhash` does all of it; a GPU's kernel computes the accumulators between.
Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import struct
from collections.abc import Sequence

LEAST_BYTES = 241  # shorter inputs are hashed in other ways
PRIME32_1 = 0x9E3779B1
_PRIME64_1 = 0x9E3779B185EBCA87
_MASK = 2**64 - 1
# The accumulators before the first stripe.
START = (
    *(0xC2B2AE3D, _PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, PRIME32_1),
)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_WORDS = struct.unpack("<24Q", _SECRET)


def seeded_secret(seed: int) -> tuple[int, ...]:
    """The secret of a seed, as 24 words of 64 bits."""
    return tuple((w - seed if i % 2 else w + seed) & _MASK for i, w in enumerate(_WORDS))


def finish(accumulators: Sequence[int], secret: Sequence[int], num_bytes: int) -> int:
    """The digest, from the eight accumulators after the last stripe."""
    data = struct.pack("<24Q", *secret)
    total = num_bytes * _PRIME64_1
    for i in range(4):
        low, high = struct.unpack_from("<2Q", data, 11 + 16 * i)
        product = (accumulators[2 * i] ^ low) * (accumulators[2 * i + 1] ^ high)
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total ^= total >> 37
    total = total * 0x165667919E3779F9 & _MASK
    return total ^ (total >> 32)
