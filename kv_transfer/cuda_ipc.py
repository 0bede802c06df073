"""The `cuda_ipc` transport: both workers' pools are on GPUs of one host.

The receiver shares its pool's allocation by a CUDA IPC handle, which travels in the offer; the
sender maps it and copies device to device. As with `shm`, whoever has the handle can write, and the
proof that nothing can land any more is a flush that succeeded or the writer's death: the driver
ends a process's copies before its marker (`kv_transfer.liveness`) is let go. The handles are those
that `torch.multiprocessing` shares CUDA storages by.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from core.errors import ConfigError, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from kv_transfer import liveness

NAME = "cuda_ipc"
_POLL_S = 0.00005
_CLOSE_TIMEOUT_S = 5.0
# What `_share_cuda_` gives, in the order in which `_new_shared_cuda` takes it.
_HANDLE_FIELDS = (
    *("device", "handle", "size_bytes", "offset_bytes", "ref_counter_handle"),
    *("ref_counter_offset", "event_handle", "event_sync_required"),
)


class CudaIpcReceiver:
    """The receiving end: others write, so only their word or their death proves quiescence."""

    name = NAME

    def __init__(self, pool: Any, me: WorkerRef) -> None:
        """`pool` is a CUDA tensor, uint8 [num_blocks, block_bytes], contiguous.

        Raises ConfigError for a pool that is not on a GPU.
        """
        if not isinstance(pool, torch.Tensor) or not pool.is_cuda:
            raise ConfigError("transfer.transport = 'cuda_ipc' needs the KV pool on a GPU")
        self._pool = pool  # the handle is good only while it lives
        self._beside, self._lock_file = liveness.create_owned(me)
        shared = pool.untyped_storage()._share_cuda_()
        fields = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in zip(_HANDLE_FIELDS, shared, strict=True)
        }
        fields["shape"] = list(pool.shape)
        fields["first_byte"] = pool.storage_offset()
        self._payload = json.dumps(fields).encode()
        self._looks = liveness.SecondLook(self._beside)

    def offer(self, writer: WorkerRef) -> TransportOffer:
        """The allocation's handle, and where a writer marks itself."""
        return TransportOffer(name=NAME, address=str(self._beside), payload=self._payload)

    def open(self, transfer: TransferId, block_ids: Sequence[int]) -> None:
        """Nothing to prepare: the sender writes at the block ids that it was told."""

    async def arrived(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """At once: the commit is sent after the last flush."""
        return True

    def revoke(self, transfer: TransferId) -> bool:
        """False: a mapping that a peer holds cannot be taken away from here."""
        return False

    def is_dead(self, writer: WorkerRef) -> bool:
        """Whether this writer's process is gone, and was a moment ago."""
        return self._looks.is_gone(writer)

    def counters(self) -> dict[str, int]:
        """Nothing: what others write passes nobody here."""
        return {}

    def close(self) -> None:
        """Removes the markers' place. Idempotent."""
        liveness.unlink_owned(self._beside)
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1


class CudaIpcSender:
    """The sending end of one pair: copies on a stream of its own."""

    name = NAME

    def __init__(self, offer: TransportOffer, me: WorkerRef, peer: WorkerRef) -> None:
        """Raises Unavailable where the peer's allocation cannot be mapped from here."""
        if not torch.cuda.is_available():
            raise Unavailable("there is no GPU here")
        beside = Path(offer.address)
        if not beside.exists():
            raise Unavailable("the peer is on another host")
        self._marker = liveness.Marker(beside, me)
        try:
            fields = json.loads(offer.payload)
            for name in ("handle", "ref_counter_handle", "event_handle"):
                fields[name] = bytes.fromhex(fields[name])
            storage = torch.UntypedStorage._new_shared_cuda(*(fields[f] for f in _HANDLE_FIELDS))
            device = torch.device("cuda", fields["device"])
            num_blocks, block_bytes = fields["shape"]
            self._pool: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=device)
            self._pool.set_(
                storage, fields["first_byte"], (num_blocks, block_bytes), (block_bytes, 1)
            )
            self._stream = torch.cuda.Stream(device)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            self._marker.close()
            raise Unavailable(f"cannot map the KV pool of {peer}: {error}") from error

    def write(self, transfer: TransferId, index: int, target: int, offset: int, data: Any) -> None:
        """Starts the copy of `data`, uint8 [n] in device or host memory."""
        if self._pool is None:
            raise Unavailable("the pair was closed")
        try:
            # What computed the bytes may still be under way on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
            with torch.cuda.stream(self._stream):
                source = torch.as_tensor(data)
                place = self._pool[target, offset : offset + source.numel()]
                place.copy_(source, non_blocking=True)
        except RuntimeError as error:
            raise Unavailable(f"the copy failed: {error}") from error

    def flush(self, *, timeout_s: float) -> None:
        """Waits until every copy has landed. Raises Unavailable where one does not in time."""
        deadline_s = time.monotonic() + timeout_s
        try:
            event = self._stream.record_event()
            while not event.query():
                if time.monotonic() > deadline_s:
                    raise Unavailable(f"the copies did not end within {timeout_s} s")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise Unavailable(f"the copy failed: {error}") from error

    def close(self) -> None:
        """Lets the mapping go; after this nothing is written. Idempotent."""
        if self._pool is not None:
            with contextlib.suppress(Unavailable):
                self.flush(timeout_s=_CLOSE_TIMEOUT_S)
            self._pool = None
        self._marker.close()
