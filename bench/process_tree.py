"""A server as the processes that it consists of: what they take, and a pause for all of them.

Reads Linux's /proc. Elsewhere, and for processes of other users, there is nothing to read.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_PROC = Path("/proc")
# Adding a process's pages up takes the kernel a tenth of a second for some GB, at the cost of the
# server that is being measured: so not often.
_FIRST_LOOK_S = 1.0
_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that are resident, summed over processes.

    PSS shares each page out among those who map it, so that the sum counts it once; RSS counts it
    for each of them.
    """

    pss_bytes: int = 0
    rss_bytes: int = 0


class ProcessTree:
    """The process of this id and all its descendants, as they are at each call."""

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid

    def pids(self) -> list[int]:
        """The root first. Those that end meanwhile may or may not be among them."""
        children: dict[int, list[int]] = {}
        for entry in _PROC.glob("[0-9]*"):
            if (fields := _stat(int(entry.name))) is not None:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
        found, new = [], [self.root_pid] if _stat(self.root_pid) is not None else []
        while new:
            found += new
            new = [child for pid in new for child in children.get(pid, ())]
        return found

    def cpu_s(self) -> float:
        """Seconds of processor time that those who are alive have taken."""
        ticks = 0
        for pid in self.pids():
            if (fields := _stat(pid)) is not None:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> Memory:
        """What is resident now."""
        totals = [memory for pid in self.pids() if (memory := _memory(pid)) is not None]
        return Memory(
            pss_bytes=sum(each.pss_bytes for each in totals),
            rss_bytes=sum(each.rss_bytes for each in totals),
        )

    def signal(self, number: signal.Signals) -> None:
        """Sends it to each of them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class MemoryWatch:
    """The most that a tree held while the block ran; None without a tree or /proc."""

    def __init__(self, tree: ProcessTree | None) -> None:
        self.peak: Memory | None = None
        self._tree = tree
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch memory")

    def _run(self) -> None:
        wait_s = _FIRST_LOOK_S
        while not self._stop.wait(wait_s):
            self._look()
            wait_s = _INTERVAL_S

    def _look(self) -> None:
        now = self._tree.memory() if self._tree is not None else Memory()
        if now.rss_bytes and (self.peak is None or now.pss_bytes >= self.peak.pss_bytes):
            self.peak = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()  # what was touched last is still there


def _stat(pid: int) -> list[str] | None:
    """The fields after the command's name, which may itself have spaces: state, parent, …"""
    with contextlib.suppress(OSError, IndexError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None


def _memory(pid: int) -> Memory | None:
    with contextlib.suppress(OSError):
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        kib = dict(_kib(lines))
        return Memory(pss_bytes=1024 * kib.get("Pss", 0), rss_bytes=1024 * kib.get("Rss", 0))
    return None


def _kib(lines: list[str]) -> Iterator[tuple[str, int]]:
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("Pss", "Rss"):
            yield name, int(value.split()[0])
