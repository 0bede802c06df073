"""The `shm` transport: the receiver's pool is a shared-memory segment that senders write into.

A segment is a file of the memory file system (of the temp folder where there is none), mode 0600,
with a random name and a one-page header that names its owner. The owner holds a lock on it while it
lives; a segment nobody holds is an orphan and is reaped. A sender holds a marker beside the segment
(`kv_transfer.liveness`). There is no ticket to show: whoever can open the file can write, and only
this user can.
"""

import contextlib
import fcntl
import json
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from core.errors import ConfigError, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from kv_transfer import liveness
from kv_transfer.digest import Blocks

NAME = "shm"
_MAGIC = b"TNDMKV01"
_HEADER_BYTES = 4096  # one page, so that the pool behind it starts on a page


class Segment:
    """A receiver's pool in shared memory: `bytes` is [num_blocks, block_bytes], uint8.

    It begins `OFFSET` bytes into its file.
    """

    OFFSET = _HEADER_BYTES

    def __init__(self, path: Path, file: int, mapped: mmap.mmap, header: dict[str, object]) -> None:
        self.path = path
        self._file = file
        self._mapped = mapped
        self.owner = WorkerRef(name=str(header["name"]), incarnation=str(header["incarnation"]))
        self.shape = (int(str(header["num_blocks"])), int(str(header["block_bytes"])))

    @classmethod
    def create(cls, owner: WorkerRef, num_blocks: int, block_bytes: int) -> Self:
        """A new segment. Pages are taken only as they are used.

        Raises ConfigError where the folder cannot hold it.
        """
        folder = liveness.shared_folder()
        size = _HEADER_BYTES + num_blocks * block_bytes
        # Pages of other segments that are not taken yet are promised to them.
        free = max(0, shutil.disk_usage(folder).free - _promised_bytes(folder))
        if size > free:
            raise ConfigError(
                f"the KV pool of {owner.name} needs {size} bytes in {folder}, which has {free}: "
                "lower engine.decode_kv_bytes or use transfer.transport = 'tcp'"
            )
        path, file = liveness.create_owned(owner)
        os.ftruncate(file, size)
        header = {
            "name": owner.name,
            "incarnation": owner.incarnation,
            "num_blocks": num_blocks,
            "block_bytes": block_bytes,
        }
        mapped = mmap.mmap(file, size)
        encoded = json.dumps(header).encode()
        mapped[len(_MAGIC) : len(_MAGIC) + 2] = len(encoded).to_bytes(2, "little")
        mapped[len(_MAGIC) + 2 : len(_MAGIC) + 2 + len(encoded)] = encoded
        mapped[: len(_MAGIC)] = _MAGIC  # last: a reader that sees it sees a whole header
        return cls(path, file, mapped, header)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Opens a peer's segment. Raises Unavailable where it is gone or is none."""
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise Unavailable(f"cannot open the peer's KV segment: {error.strerror}") from error
        try:
            size = os.fstat(file).st_size
            start = len(_MAGIC) + 2
            head = os.pread(file, _HEADER_BYTES, 0)
            length = int.from_bytes(head[len(_MAGIC) : start], "little")
            header = json.loads(head[start : start + length])
            num_blocks, block_bytes = int(header["num_blocks"]), int(header["block_bytes"])
            whole = size == _HEADER_BYTES + num_blocks * block_bytes
            if not head.startswith(_MAGIC) or not whole:
                raise ValueError("header")
            return cls(path, file, mmap.mmap(file, size), header)
        except (OSError, ValueError, KeyError) as error:
            os.close(file)
            raise Unavailable("the peer's KV segment is not one") from error

    @property
    def file(self) -> int:
        """Open while this is: for processes that share the pool with its owner."""
        return self._file

    @property
    def buffer(self) -> memoryview:
        """The pool's bytes, writable, without the header."""
        return memoryview(self._mapped)[_HEADER_BYTES:]

    @property
    def bytes(self) -> Blocks:
        return np.frombuffer(self.buffer, dtype=np.uint8).reshape(self.shape)

    def close(self) -> None:
        """Lets the mapping go; arrays over it keep it alive until they are gone."""
        with contextlib.suppress(BufferError):
            self._mapped.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def unlink(self) -> None:
        """Removes the segment and the markers beside it. Idempotent."""
        liveness.unlink_owned(self.path)


def _promised_bytes(folder: Path) -> int:
    """What the segments that are there may still grow by."""
    promised = 0
    for path in folder.glob(f"{liveness.PREFIX}*{liveness.SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            promised += max(0, found.st_size - 512 * found.st_blocks)
    return promised


class ShmReceiver:
    """The receiving end: others write, so only their word or their death proves quiescence."""

    name = NAME

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def offer(self, writer: WorkerRef) -> TransportOffer:
        """The random name is the secret: only this user can read the folder's file."""
        return TransportOffer(name=NAME, address=str(self._segment.path))

    def open(self, transfer: TransferId, block_ids: Sequence[int]) -> None:
        """Nothing to prepare: the sender writes at the block ids that it was told."""

    async def arrived(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """At once: the commit is sent after the last write."""
        return True

    def revoke(self, transfer: TransferId) -> bool:
        """False: a mapping that a peer holds cannot be taken away from here."""
        return False

    def is_dead(self, writer: WorkerRef) -> bool:
        """Whether this writer's process is gone, and with it every write it could make."""
        return liveness.is_gone(self._segment.path, writer)

    def counters(self) -> dict[str, int]:
        """Nothing: what others write passes nobody here."""
        return {}

    def close(self) -> None:
        """Removes the segment. Idempotent."""
        self._segment.unlink()


class ShmSender:
    """The sending end of one pair: copies into the receiver's segment."""

    name = NAME

    def __init__(self, offer: TransportOffer, me: WorkerRef, peer: WorkerRef) -> None:
        """Raises Unavailable where the segment cannot be opened or is not the peer's."""
        path = Path(offer.address)
        self._segment = Segment.attach(path)
        if self._segment.owner != peer:
            self._segment.close()
            raise Unavailable(f"the KV segment belongs to {self._segment.owner}, not to {peer}")
        try:
            self._marker = liveness.Marker(path, me)
        except Unavailable:
            self._segment.close()
            raise
        self._num_blocks, self._block_bytes = self._segment.shape
        self._pool: Blocks | None = self._segment.bytes.reshape(-1)

    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None:
        """Copies `data`, uint8 [n], to byte `offset` of the receiver's block `target`. Blocks."""
        if self._pool is None:
            raise Unavailable("the KV segment was closed")
        size = data.nbytes
        if not (0 <= target < self._num_blocks and 0 <= offset <= self._block_bytes - size):
            raise Unavailable(f"block {target} from byte {offset} is not in the KV segment")
        start = target * self._block_bytes + offset
        self._pool[start : start + size] = data

    def flush(self, *, timeout_s: float) -> None:
        """At once: a copy that has returned has landed."""

    def close(self) -> None:
        """After this nothing is written. Drops the lock that said so. Idempotent."""
        self._pool = None
        self._segment.close()
        self._marker.close()


def unlink_segments(worker: WorkerRef) -> list[str]:
    """Removes what a dead worker left, as an owner and as a writer; gives the names removed."""
    life = f"{worker.name}-{worker.incarnation}"
    folder = liveness.shared_folder()
    owned = folder.glob(f"{liveness.PREFIX}{life}-*{liveness.SUFFIX}*")
    marks = folder.glob(f"{liveness.PREFIX}*{liveness.SUFFIX}.{life}{liveness.MARKER}")
    return [_remove(path) for path in (*owned, *marks)]


def reap_orphans() -> list[str]:
    """Removes the segments of this user that no living owner holds; gives the names removed."""
    reaped = []
    for path in liveness.shared_folder().glob(f"{liveness.PREFIX}*{liveness.SUFFIX}"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            finally:
                os.close(file)
            reaped += [_remove(found) for found in path.parent.glob(f"{path.name}*")]
    return reaped


def _remove(path: Path) -> str:
    path.unlink(missing_ok=True)
    return path.name
