"""Who uses a run directory, told by file locks: the kernel drops them at any death, `kill -9` too.

The launcher holds `launcher.pid` alone. Each process of the cluster holds the directory itself,
shared. Once the launcher is gone, the process that leaves last removes the directory.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

LAUNCHER_FILE = "launcher.pid"


def claim(run_dir: Path) -> int:
    """Makes the caller the launcher of a directory, for as long as the returned fd is open.

    The file also says its process id, for people: ids are used again, so nothing here trusts it.
    """
    fd = os.open(run_dir / LAUNCHER_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def join(run_dir: Path) -> int:
    """Makes the caller a user of a directory, for as long as the returned fd is open.

    Raises OSError where the directory is gone, or about to go.
    """
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def launcher_is_gone(run_dir: Path) -> bool:
    """Whether the launcher that claimed this directory has ended."""
    try:
        fd = os.open(run_dir / LAUNCHER_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def await_launcher_death(run_dir: Path) -> None:
    """Blocks until the launcher that claimed this directory has ended, however long that is.

    No signal says this as well: Linux sends the one for a parent's death when the parent's thread
    ends, while other threads of the launcher still hold its lock.
    """
    with contextlib.suppress(FileNotFoundError), (run_dir / LAUNCHER_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def remove_if_abandoned(run_dir: Path, membership: int | None = None) -> bool:
    """Removes a directory that neither a launcher nor another process uses; says whether it did.

    `membership` is the caller's own fd of `join`: its shared lock is traded for the exclusive one,
    which the kernel grants to the last user only.
    """
    if not launcher_is_gone(run_dir):
        return False
    with contextlib.ExitStack() as stack:
        if membership is None:
            try:
                membership = join(run_dir)
            except OSError:
                return False
            stack.callback(os.close, membership)
        try:
            fcntl.flock(membership, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(run_dir, ignore_errors=True)
    return True
