"""A cluster as its scheduler's admin port shows it, and a watch over its block ledgers."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker's last report. `blocks` is its pool by state."""

    name: str
    incarnation: str
    role: str
    num_blocks: int
    blocks: Mapping[str, int]
    num_running: int
    num_waiting: int
    counters: Mapping[str, int]

    @property
    def num_held_blocks(self) -> int:
        """Blocks that some request holds: neither free nor cached."""
        return self.num_blocks - self.blocks["free"] - self.blocks["cached"]

    @property
    def balanced(self) -> bool:
        """Conservation: the states sum to the pool. True of a worker that has not reported yet."""
        total = sum(self.blocks.values())
        return total in (0, self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """What the scheduler knows."""

    num_queued: int
    num_placed: int
    workers: tuple[WorkerState, ...]

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    def worker(self, name: str) -> WorkerState | None:
        """The present life of the worker of this name, if it is registered."""
        return next((worker for worker in self.workers if worker.name == name), None)

    def blocks(self, state: str, role: str) -> int:
        """Blocks in this state over all workers of the role."""
        return sum(worker.blocks[state] for worker in self.workers if worker.role == role)

    def at_rest(self, num_workers: int) -> bool:
        """Whether that many workers are there, nothing is placed and no block is held."""
        return (
            len(self.workers) == num_workers
            and not self.num_queued
            and not self.num_placed
            and not any(worker.num_held_blocks for worker in self.workers)
        )


def look(admin_url: str) -> ClusterState:
    """Asks the admin port. Raises httpx.HTTPError where it does not answer."""
    response = httpx.get(f"{admin_url}/cluster", timeout=_TIMEOUT_S, trust_env=False)
    response.raise_for_status()
    found = response.json()
    return ClusterState(
        num_queued=found["num_queued"],
        num_placed=found["num_placed"],
        workers=tuple(_worker(each) for each in found["workers"]),
    )


def _worker(found: Mapping[str, Any]) -> WorkerState:
    name, _, incarnation = found["worker"].partition("/")
    return WorkerState(
        name=name,
        incarnation=incarnation,
        role=found["role"],
        num_blocks=found["num_blocks"],
        blocks=found["blocks"],
        num_running=found["num_running"],
        num_waiting=found["num_waiting"],
        counters=found["counters"],
    )


class LedgerWatch:
    """Looks again and again while the block runs, and keeps what must never be seen."""

    def __init__(self, admin_url: str, *, interval_s: float = 0.1) -> None:
        self.num_looks = 0
        self.unbalanced: list[WorkerState] = []
        self.max_quarantined = 0
        self._admin_url = admin_url
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch the ledgers")

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                state = look(self._admin_url)
            except httpx.HTTPError:  # a scheduler may be killed meanwhile
                continue
            self.num_looks += 1
            self.unbalanced += [worker for worker in state.workers if not worker.balanced]
            quarantined = sum(worker.blocks["quarantined"] for worker in state.workers)
            self.max_quarantined = max(self.max_quarantined, quarantined)

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
