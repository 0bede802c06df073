"""Whether a writer on this host can still write, as the kernel tells it.

A receiver owns a file under a lock that it holds while it lives; a file nobody holds is an orphan.
A writer holds a lock on a marker beside that file for as long as it could write, so that the
receiver can tell a dead writer from a silent one: the kernel drops the lock only when the process
is gone, and with it every write that it could make itself.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from core.errors import Unavailable
from core.messages import WorkerRef

PREFIX = "tandem-"
SUFFIX = ".kv"
MARKER = ".writer"
_SECOND_LOOK_S = 0.1
_MARK_TIMEOUT_S = 5.0
_MARK_POLL_S = 0.005
# States of a TCP connection, from the kernel's include/net/tcp_states.h.
_ESTABLISHED, _CLOSE, _CLOSE_WAIT = 1, 7, 8


def shared_folder() -> Path:
    """Where processes of one host share files: memory where the system has such a folder."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def create_owned(owner: WorkerRef) -> tuple[Path, int]:
    """A new file of this user alone, with a random name; gives it open and locked."""
    name = f"{PREFIX}{owner.name}-{owner.incarnation}-{secrets.token_hex(8)}{SUFFIX}"
    path = shared_folder() / name
    unlocked = path.with_suffix(".new")
    file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    unlocked.rename(path)  # only a locked file bears the name that the reaper looks for
    return path, file


def unlink_owned(path: Path) -> None:
    """Removes an owned file and the markers beside it. Idempotent."""
    path.unlink(missing_ok=True)
    for marker in path.parent.glob(f"{path.name}.*{MARKER}"):
        marker.unlink(missing_ok=True)


class Marker:
    """Says that this process may write to the receiver that owns `beside`, until `close`."""

    def __init__(self, beside: Path, writer: WorkerRef) -> None:
        """Raises Unavailable where the mark cannot be made."""
        path = _marker(beside, writer)
        deadline_s = time.monotonic() + _MARK_TIMEOUT_S
        while True:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise Unavailable(f"cannot mark the writer: {error.strerror}") from error
            # Shared: a second stream of this pair opens a second one before the first is closed.
            with contextlib.suppress(BlockingIOError):  # the receiver is just looking
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if _is_at(self._file, path):  # else the receiver took it away before we had it
                    return
            os.close(self._file)
            if time.monotonic() > deadline_s:
                raise Unavailable("cannot mark the writer: the receiver holds the marker")
            time.sleep(_MARK_POLL_S)

    def close(self) -> None:
        """After this nothing is written. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_gone(beside: Path, writer: WorkerRef) -> bool:
    """Whether this writer never marked itself, has closed, or is dead."""
    path = _marker(beside, writer)
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


class SecondLook:
    """`is_gone`, believed only a moment after it was first seen.

    A dying process's files are closed one after the other: what else it could write with may go a
    little later than its mark.
    """

    def __init__(self, beside: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._beside = beside
        self._clock = clock
        self._first_s: dict[WorkerRef, float] = {}

    def is_gone(self, writer: WorkerRef) -> bool:
        """Whether this writer was gone a moment ago already, and still is."""
        if not is_gone(self._beside, writer):
            self._first_s.pop(writer, None)
            return False
        now_s = self._clock()
        return now_s - self._first_s.setdefault(writer, now_s) >= _SECOND_LOOK_S

    def forget(self, writer: WorkerRef) -> None:
        """The next death of a writer of this name is looked at anew."""
        self._first_s.pop(writer, None)


def streams_are_read() -> bool:
    """Whether no TCP connection of this process can still bring bytes of an end that closed.

    A process's death ends its writes, but not those that the kernel carries on with: bytes in the
    socket buffers of a one-sided transport land after it. False while any connection of this
    process is half closed, was reset and not yet closed here, or has its other end on this host
    with no process behind it.
    """
    orphans: set[tuple[str, str]] | None = None
    for name in os.listdir("/proc/self/fd"):
        try:
            state, ends = _connection(int(name))
        except OSError:
            continue  # no socket, or closed meanwhile
        if state in (_CLOSE, _CLOSE_WAIT):
            return False
        if state == _ESTABLISHED:
            if orphans is None:
                orphans = _orphaned_ends()
            if ends in orphans:
                return False
    return True


def _connection(file: int) -> tuple[int, tuple[str, str]]:
    """State and (peer, own) addresses of a TCP connection. Raises OSError for any other file."""
    copy = os.dup(file)
    try:
        duplicate = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with duplicate:
        state = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        ends = ("", "")
        if state == _ESTABLISHED:
            ends = (_as_kernel(duplicate.getpeername()), _as_kernel(duplicate.getsockname()))
        return state, ends


def _as_kernel(address: tuple[str, int]) -> str:
    """An IPv4 address as /proc/net/tcp writes it; others as something that is never there."""
    try:
        host = socket.inet_aton(address[0].removeprefix("::ffff:"))
    except OSError:
        return ""
    return f"{int.from_bytes(host, 'little'):08X}:{address[1]:04X}"


def _orphaned_ends() -> set[tuple[str, str]]:
    """(own, peer) of every connection on this host that no process holds and that is not done."""
    ends = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), Path("/proc/net", table).open() as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                # local, remote, state; inode is 0 where no process has it. 06 is TIME_WAIT.
                if fields[9] == "0" and fields[3] != "06":
                    ends.add((fields[1][-13:], fields[2][-13:]))
    return ends


def _marker(beside: Path, writer: WorkerRef) -> Path:
    return beside.with_name(f"{beside.name}.{writer.name}-{writer.incarnation}{MARKER}")


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
