"""What a sender achieves: bytes, seconds and GB/s of one pair, counted and logged."""

import time
from typing import TYPE_CHECKING

import structlog

from core.messages import TransferId, WorkerRef
from kv_transfer.digest import Blocks

if TYPE_CHECKING:
    from kv_transfer.transport import BlockSender

_LOG_EVERY_BYTES = 1 << 32


class MeteredSender:
    """Counts what passes through a sender. The seconds are those spent in `write` and `flush`."""

    def __init__(self, sender: "BlockSender", peer: WorkerRef, *, num_fallbacks: int) -> None:
        """`num_fallbacks`: how many of the peer's offers failed before this one."""
        self._sender = sender
        self._num_fallbacks = num_fallbacks
        self._num_bytes = 0
        self._busy_ns = 0
        self._logged_bytes = 0
        self._log = structlog.get_logger().bind(peer=str(peer), transport=sender.name)

    @property
    def name(self) -> str:
        return self._sender.name

    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None:
        """As the sender's own."""
        started_ns = time.perf_counter_ns()
        self._sender.write(transfer, index, target, offset, data)
        self._busy_ns += time.perf_counter_ns() - started_ns
        self._num_bytes += data.nbytes
        if self._num_bytes - self._logged_bytes >= _LOG_EVERY_BYTES:
            self._say()

    def flush(self, *, timeout_s: float) -> None:
        """As the sender's own."""
        started_ns = time.perf_counter_ns()
        self._sender.flush(timeout_s=timeout_s)
        self._busy_ns += time.perf_counter_ns() - started_ns

    def counters(self) -> dict[str, int]:
        """Of this pair since it was made; `busy_us` is the time in which the bytes were sent."""
        return {
            "bytes_sent": self._num_bytes,
            "busy_us": self._busy_ns // 1000,
            "fallbacks": self._num_fallbacks,
        }

    def close(self) -> None:
        """Closes the sender. Idempotent."""
        if self._num_bytes > self._logged_bytes:
            self._say()
        self._sender.close()

    def _say(self) -> None:
        self._logged_bytes = self._num_bytes
        self._log.info(
            "kv_sent",
            bytes=self._num_bytes,
            busy_s=round(self._busy_ns / 1e9, 6),
            gb_per_s=round(self._num_bytes / max(self._busy_ns, 1), 3),
        )
