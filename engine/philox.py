"""One uniform number per (seed, choice, position): chance without state.

Philox4x32-10 is a bijection of a 128-bit counter under a 64-bit key, good enough to be used as a
random function. Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011), https://doi.org/10.1145/2063384.2063405.
"""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four random 32-bit words of a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. `seed` is any 64-bit integer, signed or not."""
    counter = (position & _MASK, (position >> 32) & _MASK, choice & _MASK, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 21) | (low >> 11)) * 2.0**-53
