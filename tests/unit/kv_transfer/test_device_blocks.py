"""Blocks of a pool on a GPU and their mirror; here both lie in host memory."""

import numpy as np
import pytest
import torch

from core.messages import TransferId
from kv_transfer.blocks import HostBlocks, block_store
from kv_transfer.device_blocks import DeviceBlocks
from kv_transfer.digest import block_digests, block_seed

TRANSFER = TransferId(request_id="r", attempt=1)
NUM_BLOCKS, BLOCK_BYTES = 4, 512


class Pool:
    """A pool with numbers in it, its mirror with none, and what was asked of them."""

    def __init__(self, *, with_digests: bool) -> None:
        self.bytes = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.mirror = np.zeros_like(self.bytes)
        self.waits = 0
        self.seeds: list[list[int]] = []
        self.blocks = DeviceBlocks(
            torch.from_numpy(self.bytes),
            self.mirror,
            await_written=self._await_written,
            device_digests=self._digests if with_digests else None,
        )

    def _await_written(self) -> None:
        self.waits += 1

    def _digests(self, blocks: torch.Tensor, seeds: list[int]) -> tuple[int, ...]:
        assert torch.equal(blocks, torch.from_numpy(self.bytes[[3, 1]]))
        self.seeds.append(seeds)
        return (7, 8)


@pytest.fixture
def pool() -> Pool:
    return Pool(with_digests=False)


def test_a_piece_for_a_host_transport_is_copied_once_it_is_computed(pool: Pool) -> None:
    piece = pool.blocks.piece(2, 100, 50, "tcp")
    assert isinstance(piece, np.ndarray)
    assert np.array_equal(piece, pool.bytes[2, 100:150])
    assert pool.waits == 1
    assert np.count_nonzero(pool.mirror) == np.count_nonzero(piece)


def test_a_transport_between_gpus_gets_the_devices_own_bytes(pool: Pool) -> None:
    piece = pool.blocks.piece(2, 100, 50, "cuda_ipc")
    assert isinstance(piece, torch.Tensor)
    assert piece.data_ptr() == pool.bytes[2, 100:].ctypes.data
    assert pool.waits == 1
    assert not pool.mirror.any()


def test_what_a_host_transport_brought_is_computed_with_once_it_landed(pool: Pool) -> None:
    before = pool.bytes.copy()
    pool.mirror[[0, 3]] = 9
    digests = pool.blocks.digests(TRANSFER, 0, (3, 0), "tcp")
    assert digests == block_digests(TRANSFER, pool.mirror, (3, 0))
    assert np.array_equal(pool.bytes, before)
    pool.blocks.landed((3, 0), "tcp")
    assert (pool.bytes[[0, 3]] == 9).all()
    assert np.array_equal(pool.bytes[[1, 2]], before[[1, 2]])


def test_what_came_from_a_gpu_is_there_already(pool: Pool) -> None:
    before = pool.bytes.copy()
    pool.mirror[:] = 9
    pool.blocks.landed((0, 1), "cuda_ipc")
    assert np.array_equal(pool.bytes, before)


def test_digests_are_the_same_wherever_they_are_computed(pool: Pool) -> None:
    host = HostBlocks(pool.bytes).digests(TRANSFER, 5, (3, 1), "shm")
    assert pool.blocks.digests(TRANSFER, 5, (3, 1), "cuda_ipc") == host
    other = Pool(with_digests=True)
    assert other.blocks.digests(TRANSFER, 5, (3, 1), "cuda_ipc") == (7, 8)
    assert other.seeds == [[block_seed(TRANSFER, 5), block_seed(TRANSFER, 6)]]


def test_a_pool_in_host_memory_needs_no_mirror(pool: Pool) -> None:
    store = block_store(pool.bytes, None, await_written=lambda: None, device_digests=None)
    piece = store.piece(1, 0, 8, "tcp")
    assert piece.base is pool.bytes or piece.ctypes.data == pool.bytes[1].ctypes.data
    store.landed((1,), "tcp")
