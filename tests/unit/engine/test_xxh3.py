"""Digests by a kernel are those of the host's library, to the last bit; in the interpreter."""

import pytest
import torch
import xxhash

from engine.triton import runtime
from engine.triton.digests import TritonDigests

pytestmark = pytest.mark.skipif(not runtime.interpreted(), reason="`make test-gpu` runs them")
CPU = torch.device("cpu")


# A part of a round, whole rounds, a round and a word, rounds and stripes; 248 is the shortest.
@pytest.mark.parametrize("num_bytes", [248, 256, 1024, 1032, 2048, 4096 + 200])
def test_blocks_of_any_length_and_seed(num_bytes: int) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(num_bytes)
    blocks = torch.randint(0, 256, (3, num_bytes), dtype=torch.uint8, generator=generator)
    seeds = (0, 2**63 + 12345, 2**64 - 1)
    expected = tuple(
        xxhash.xxh3_64_intdigest(row.numpy().tobytes(), seed=seed)
        for row, seed in zip(blocks, seeds, strict=True)
    )
    assert TritonDigests(CPU)(blocks, seeds) == expected


def test_what_is_hashed_otherwise_is_not_taken() -> None:
    assert [n for n in (64, 240, 248, 1023, 1024) if TritonDigests.takes(n)] == [248, 1024]
