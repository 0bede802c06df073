"""The pool is one block-major memory, its own or another's."""

import resource
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from engine.kv_cache import KvCache, KvSpec

SPEC = KvSpec(
    num_blocks=6, num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16
)


def test_a_block_of_the_tensor_is_one_row_of_bytes() -> None:
    kv = KvCache(SPEC)
    assert SPEC.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    assert kv.bytes.shape == (6, SPEC.block_bytes)
    kv.pool[4].normal_()
    row = torch.from_numpy(kv.bytes[4].copy()).view(torch.bfloat16)
    assert torch.equal(row, kv.pool[4].flatten())
    assert not kv.bytes[[0, 1, 2, 3, 5]].any()


def test_bytes_written_from_outside_are_seen_in_the_tensor() -> None:
    kv = KvCache(SPEC)
    kv.bytes[2] = 0x3F  # bfloat16 0x3F3F
    assert bool((kv.pool[2] == 0.74609375).all())


def test_an_external_buffer_is_the_pool() -> None:
    memory = bytearray(SPEC.kv_bytes + 100)
    kv = KvCache(SPEC, memoryview(memory))
    kv.pool.fill_(1.0)
    assert bytes(memory[: SPEC.kv_bytes]) == kv.bytes.tobytes()
    assert not any(memory[SPEC.kv_bytes :])


@pytest.mark.parametrize("buffer", [bytes(SPEC.kv_bytes), bytearray(SPEC.kv_bytes - 1)])
def test_a_buffer_that_cannot_hold_the_pool_is_refused(buffer: bytes) -> None:
    with pytest.raises(ValueError):
        KvCache(SPEC, memoryview(buffer))


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_a_large_pool_takes_no_memory_before_it_is_used() -> None:
    large = replace(SPEC, num_blocks=2**30 // SPEC.block_bytes)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv = KvCache(large)
    assert kv.bytes[-1].sum() == np.uint64(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


def test_the_number_of_blocks_follows_from_the_bytes() -> None:
    assert SPEC.num_blocks_for(SPEC.block_bytes * 9 + 1) == 9
    with pytest.raises(ConfigError, match="holds no block"):
        SPEC.num_blocks_for(SPEC.block_bytes - 1)


def test_a_copied_block_is_equal_in_every_layer_and_no_other_is_touched() -> None:
    kv = KvCache(SPEC)
    kv.pool.normal_()
    before = kv.pool.clone()
    kv.copy_block(4, 1)
    assert torch.equal(kv.pool[1], before[4])
    assert torch.equal(kv.pool[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])
