"""The pool is one block-major memory, its own or another's."""

import os
import resource
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from engine.kv_cache import KvCache, KvSpec, PoolMemory

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


def test_a_block_is_its_ranks_parts_one_behind_the_other() -> None:
    spec = replace(SPEC, ranks=2)
    memory = memoryview(bytearray(spec.kv_bytes))
    ranks = [KvCache(spec, memory, rank=rank) for rank in range(2)]
    for rank, kv in enumerate(ranks):
        assert kv.pool.shape == SPEC.shape
        kv.pool.fill_(rank + 1.0)
    block = torch.from_numpy(ranks[0].bytes[3]).view(spec.dtype)
    assert (len(ranks[0].bytes[3]), spec.rank_bytes) == (2 * SPEC.block_bytes, SPEC.block_bytes)
    first, second = block.chunk(2)
    assert bool((first == 1).all()) and bool((second == 2).all())
    ranks[1].pool[1].normal_()
    ranks[1].copy_block(1, 0)
    assert torch.equal(ranks[1].pool[0], ranks[1].pool[1])
    assert bool((ranks[0].pool == 1).all())


def test_memory_for_several_processes_is_one_memory() -> None:
    made = PoolMemory.anonymous(8192)
    again = PoolMemory.mapped(made.file, 4096, 4096)
    again.buffer[:3] = b"abc"
    assert bytes(made.buffer[4096:4099]) == b"abc"
    os.close(made.file)
