"""Blocks of a pool on a GPU. Transports that know host memory alone work on a mirror of it.

The mirror has the pool's shape and block ids: what leaves is copied there first, and what arrives
is copied from there. Copies go over a stream of their own, and whoever asked waits for an event
behind them: the compute stream waits for no copy, and a copy for what is marked as written alone.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
import torch

from core.messages import TransferId
from kv_transfer.blocks import READS_DEVICE, HostBlocks
from kv_transfer.digest import Blocks, block_seed

# Of blocks uint8 [n, block_bytes] on the device, with their seeds.
DeviceDigests = Callable[[torch.Tensor, Sequence[int]], tuple[int, ...]]


class DeviceBlocks:
    """`pool` is uint8 [num_blocks, block_bytes] on a GPU, `mirror` the like in host memory.

    `await_written` waits until what the engine has marked as computed is in the pool.
    `device_digests` computes digests there; None: they are computed of the mirror.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        mirror: Blocks,
        *,
        await_written: Callable[[], None],
        device_digests: DeviceDigests | None,
    ) -> None:
        self._pool = pool
        self._mirror = torch.from_numpy(mirror)
        self._host = HostBlocks(mirror)
        self._await_written = await_written
        self._device_digests = device_digests
        self._copies = _Copies(pool.device)
        self.block_bytes: int = pool.shape[1]

    def piece(self, block_id: int, start: int, size: int, transport: str) -> Any:
        self._await_written()
        part = slice(start, start + size)
        if transport in READS_DEVICE:
            return self._pool[block_id, part]
        self._copies.run([(self._mirror[block_id, part], self._pool[block_id, part])])
        return self._host.piece(block_id, start, size, transport)

    def digests(
        self, transfer: TransferId, first_index: int, block_ids: Iterable[int], transport: str
    ) -> tuple[int, ...]:
        ids = list(block_ids)
        if transport not in READS_DEVICE:  # the mirror has them by now
            return self._host.digests(transfer, first_index, ids, transport)
        if self._device_digests is not None and ids:
            seeds = [block_seed(transfer, first_index + i) for i in range(len(ids))]
            index = torch.tensor(ids, device=self._pool.device)
            return self._device_digests(self._pool[index], seeds)
        self._copies.run([(self._mirror[i], self._pool[i]) for i in ids])
        return self._host.digests(transfer, first_index, ids, transport)

    def landed(self, block_ids: Iterable[int], transport: str) -> None:
        if transport not in READS_DEVICE:
            self._copies.run([(self._pool[i], self._mirror[i]) for i in block_ids])


class _Copies:
    """A stream for copies alone. Callable from several threads."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each second into its first; returns once all are there."""
        with torch.inference_mode():
            if self._stream is None:
                for target, source in pairs:
                    target.copy_(source)
                return
            with self._lock, torch.cuda.stream(self._stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
        done.synchronize()


def pin(mirror: Blocks, *, available_bytes: int) -> bool:
    """Locks a mirror's pages, which makes copies several times faster and lets them run beside all.

    Not where it would take more than half of `available_bytes`, what the machine has left: locked
    pages are taken whether blocks lie in them or not. True where it was done; the driver lets the
    pages go with the process.
    """
    if mirror.nbytes > available_bytes // 2:
        structlog.get_logger().info(
            "mirror_not_pinned", mirror_bytes=mirror.nbytes, available_bytes=available_bytes
        )
        return False
    cudart: Any = torch.cuda.cudart()
    return int(cudart.cudaHostRegister(mirror.ctypes.data, mirror.nbytes, 0)) == 0
