"""A worker's blocks as the hand-off takes and gives them, wherever the pool lies."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from core.messages import TransferId
from kv_transfer.digest import Blocks, block_digest

# Senders that copy from a GPU's memory by themselves; all others read the host's.
READS_DEVICE = frozenset({"cuda_ipc"})


class BlockStore(Protocol):
    """The blocks of one pool. `transport` is the name of the one that takes or brought them."""

    @property
    def block_bytes(self) -> int: ...

    def piece(self, block_id: int, start: int, size: int, transport: str) -> Any:
        """Bytes [start, start + size) of a block whose KV was computed, for a sender's `write`.

        They stay as they are until the block is computed anew. Waits for a computation under way.
        """
        ...

    def digests(
        self, transfer: TransferId, first_index: int, block_ids: Iterable[int], transport: str
    ) -> tuple[int, ...]:
        """`kv_transfer.digest.block_digest` of blocks from `first_index` of the prompt on."""
        ...

    def landed(self, block_ids: Iterable[int], transport: str) -> None:
        """A transport has brought these whole: from here on they are what is computed with."""
        ...


class HostBlocks:
    """A pool in host memory: what a transport writes is what is computed with."""

    def __init__(self, pool: Blocks) -> None:
        self._pool = pool
        self.block_bytes: int = pool.shape[1]

    def piece(self, block_id: int, start: int, size: int, transport: str) -> Blocks:
        return self._pool[block_id, start : start + size]

    def digests(
        self, transfer: TransferId, first_index: int, block_ids: Iterable[int], transport: str
    ) -> tuple[int, ...]:
        """Releases the GIL while it reads."""
        return tuple(
            block_digest(transfer, index, self._pool[block_id])
            for index, block_id in enumerate(block_ids, first_index)
        )

    def landed(self, block_ids: Iterable[int], transport: str) -> None:
        """They are where they belong."""


def block_store(
    host_bytes: Blocks,
    device_bytes: Any | None,
    *,
    await_written: Callable[[], None],
    device_digests: Callable[[Any, Sequence[int]], tuple[int, ...]] | None,
) -> BlockStore:
    """The store of a pool: in host memory, or on a GPU with `host_bytes` as its mirror."""
    if device_bytes is None:
        return HostBlocks(host_bytes)
    from kv_transfer.device_blocks import DeviceBlocks, pin  # brings torch

    pin(host_bytes, available_bytes=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return DeviceBlocks(
        device_bytes, host_bytes, await_written=await_written, device_digests=device_digests
    )
