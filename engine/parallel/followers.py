"""The ranks of a model beside the first: processes that it starts, tells each step, and ends."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Self

import structlog
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from core.errors import ConfigError, Unavailable
from engine.kv_cache import KvSpec, PoolMemory
from engine.parallel.group import RankGroup
from engine.parallel.messages import Begin, Done, Pool, for_others
from engine.parallel.shard import Shard
from engine.step_batch import StepBatch

_ROOT = Path(__file__).resolve().parents[2]
# To start a process and to read its part of the largest models from a slow disk.
_LOAD_TIMEOUT_S = 1800.0
_END_TIMEOUT_S = 5.0

# Told which rank ended and how. From any thread, once.
OnLost = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Follower:
    shard: Shard
    process: subprocess.Popen[bytes]
    pipe: Connection


class Followers:
    """Ranks 1 and up. All but `close` is called on the compute thread.

    They live as long as this object is not closed and this process lives. One that ends before is
    told to `on_lost` at once, on a thread of its own, and so is a step in which the ranks fell
    apart: the model cannot be computed any more.
    """

    def __init__(
        self,
        followers: list[_Follower],
        group: RankGroup,
        meeting: tempfile.TemporaryDirectory[str],
        on_lost: OnLost,
    ) -> None:
        """`meeting` has the file by which the ranks find each other; it is removed by this."""
        self._followers = followers
        self.group = group
        self._meeting = meeting
        self._on_lost = on_lost
        self._closing = False
        self._told = threading.Lock()
        for each in followers:
            watch = threading.Thread(
                target=self._watch, args=(each,), name=f"rank {each.shard.rank}", daemon=True
            )
            watch.start()

    @classmethod
    def start(cls, begin: Begin, on_lost: OnLost) -> Self:
        """Starts them, and has them begin to load. `begin` is what this rank itself is told.

        Raises Unavailable where they cannot be started, or do not find each other.
        """
        started: list[_Follower] = []
        meeting = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        store = str(Path(meeting.name) / "store")
        try:
            for rank in range(1, begin.shard.ranks):
                started.append(_started(Shard(rank, begin.shard.ranks), begin.threads))
            for each in started:
                _hear(each)  # that it is there
                each.pipe.send(replace(begin, shard=each.shard, store=store))
            files = FileStore(store, begin.shard.ranks)
            group = RankGroup(files, begin.shard, torch.device("cpu"))
        except BaseException:
            _end(started)
            meeting.cleanup()
            raise
        return cls(started, group, meeting, on_lost)

    def await_loaded(self) -> None:
        """Raises ConfigError where one cannot load its part, Unavailable where one ended."""
        for each in self._followers:
            _hear(each)
        self._meeting.cleanup()  # now that all have found all

    def give_pool(self, spec: KvSpec, memory: PoolMemory) -> None:
        """Has each take its part of the pool. Raises Unavailable where one ended."""
        for each in self._followers:
            each.pipe.send(Pool(spec=spec, offset=memory.offset))
            send_handle(each.pipe, memory.file, each.process.pid)
        for each in self._followers:
            _hear(each)

    @contextlib.contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """See `engine.parallel.others.OtherRanks`."""
        try:
            told = for_others(batch)
            for each in self._followers:
                each.pipe.send(told)
            yield
        except BaseException as error:
            self._lost(f"the ranks fell apart in a step: {error}")
            raise

    def close(self) -> None:
        """Ends them; blocks for some seconds at most. Idempotent."""
        self._closing = True
        _end(self._followers)
        self._meeting.cleanup()

    def _watch(self, follower: _Follower) -> None:
        code = follower.process.wait()
        self._lost(f"rank {follower.shard.rank} ended with code {code}")

    def _lost(self, why: str) -> None:
        if self._closing or not self._told.acquire(blocking=False):
            return
        structlog.get_logger().error("rank_lost", why=why)
        self._on_lost(why)


def _started(shard: Shard, threads: int) -> _Follower:
    mine, its = multiprocessing.Pipe()
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    counts = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.parallel.follower", str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **counts, "PYTHONPATH": path},
        )
    except OSError as error:
        mine.close()
        raise Unavailable(f"rank {shard.rank} cannot be started: {error}") from error
    finally:
        its.close()  # so that the end of either process is seen by the other
    return _Follower(shard, process, mine)


def _hear(follower: _Follower) -> None:
    """Waits for its word."""
    rank = follower.shard.rank
    try:
        if not follower.pipe.poll(_LOAD_TIMEOUT_S):
            raise Unavailable(f"rank {rank} has not said a word for {_LOAD_TIMEOUT_S:.0f} s")
        said: Done = follower.pipe.recv()
    except (EOFError, OSError) as error:
        raise Unavailable(
            f"rank {rank} ended before it was ready (code {follower.process.poll()})"
        ) from error
    if said.refused is not None:
        raise ConfigError(f"rank {rank}: {said.refused}")


def _end(followers: list[_Follower]) -> None:
    """Their pipes' end ends them; what does not heed it is killed."""
    for each in followers:
        each.pipe.close()
    for each in followers:
        try:
            each.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait(_END_TIMEOUT_S)
