"""A `torch.distributed` process group of two, and the messages that its ranks exchange.

Made directly, without the process's default group, so that a process can have one per peer.
"""

import contextlib
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from core.errors import Unavailable
from kv_transfer.digest import Blocks

RECEIVER, SENDER = 0, 1
NUM_SLOTS = 4
HEAD_BYTES = 512  # of a slot, before the payload
GROUP_TIMEOUT_S = 5.0


def best_backend() -> str:
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


class Group:
    """The two ranks' messages: slots of `HEAD_BYTES` + block_bytes, each one message at a time."""

    def __init__(self, store: Store, rank: int, backend: str, host: str, block_bytes: int) -> None:
        """Blocks until the other rank is there. Raises Unavailable where it does not come."""
        self._peer = 1 - rank
        self._whole = backend == "nccl"  # it needs equal sizes at both ends
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        size = (NUM_SLOTS, HEAD_BYTES + block_bytes)
        self._slots = torch.zeros(size, dtype=torch.uint8, device=device)
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        store = PrefixStore("group", store)
        try:
            if backend == "nccl":
                nccl_options: Any = dist.ProcessGroupNCCL.Options()
                nccl_options._timeout = timeout
                self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, nccl_options)
            else:
                gloo: Any = dist.ProcessGroupGloo  # its options have no public name
                options = gloo._Options()
                options._timeout = timeout
                options._threads = 1
                options._devices = [gloo.create_device(hostname=host)]
                self._group = gloo(store, rank, 2, options)
        except RuntimeError as error:
            raise Unavailable(f"the group was not made: {first_line(error)}") from error

    def fill(self, slot: int, head: bytes, payload: Blocks | None) -> torch.Tensor:
        """Copies a message into a slot."""
        self._slots[slot, : len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        end = HEAD_BYTES
        if payload is not None:
            end += payload.nbytes
            self._slots[slot, HEAD_BYTES:end] = _as_tensor(payload)
        return self._slots[slot] if self._whole else self._slots[slot, :end]

    def message(self, slot: int) -> Blocks:
        """What came in a slot, uint8, in host memory."""
        message: Blocks = self._slots[slot].cpu().numpy()
        return message

    def abort(self) -> None:
        """Gives up what is on its way, so far as the backend can."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def send(self, slot: int, message: torch.Tensor) -> dist.Work:
        work: dist.Work = self._group.send([message], self._peer, slot)
        return work

    def receive(self, slot: int) -> dist.Work:
        work: dist.Work = self._group.recv([self._slots[slot]], self._peer, slot)
        return work


def _as_tensor(data: Blocks) -> torch.Tensor:
    if not data.flags.writeable:  # torch has no read-only tensors, and says so
        data = np.array(data)
    return torch.from_numpy(data)


def first_line(error: BaseException) -> str:
    """Of what torch says, which may be a page."""
    return str(error).strip().partition("\n")[0][:120]
