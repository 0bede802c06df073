"""One process of the cluster, kept alive."""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from core.errors import ConfigError, Unavailable
from core.messages import WorkerRef
from core.process import BEAT_S, EXIT_CONFIG, arguments, ready_file, remove_files
from deploy.environment import command
from deploy.restarts import Restarts
from kv_transfer.shm import unlink_segments

_READY_POLL_S = 0.05
_LIFE_POLL_S = BEAT_S
# The kernel needs a moment to end a process that was killed.
_KILL_WAIT_S = 5.0
_STDERR = 2


class ChildRefused(ConfigError):
    """A child ended with EXIT_CONFIG. It has said why on stderr: there is nothing to add."""


class Child:
    """Starts a module, watches it, restarts it with a new incarnation, stops it.

    `ready` is set while the present life serves. `task` ends when the child has been stopped, or
    with the error that says why it cannot be kept alive.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        run_dir: Path,
        environment: Mapping[str, str],
        frozen_after_s: float,
        log: structlog.stdlib.BoundLogger,
        model: str | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self.ready = asyncio.Event()
        self._module = module
        self._run_dir = run_dir
        self._environment = environment
        self._frozen_after_s = frozen_after_s
        self._log = log.bind(child=name)
        self._stopping = asyncio.Event()
        self._restarts = Restarts()
        self._process: asyncio.subprocess.Process | None = None
        self.task = asyncio.create_task(self._keep_alive(), name=f"keep {name} alive")

    async def stop(self, grace_s: float) -> None:
        """Asks the child to end, and ends it after `grace_s` seconds."""
        self._stopping.set()
        self.send_signal(signal.SIGTERM)
        await asyncio.wait({self.task}, timeout=grace_s)
        if not self.task.done():
            self._log.warning("killed: did not stop in time", grace_s=grace_s)
            self.kill()
            await asyncio.wait({self.task}, timeout=_KILL_WAIT_S)
        if self.task.done() and not self.task.cancelled():
            self.task.exception()  # whoever watches the task has it; here it only ends

    def kill(self) -> None:
        """Ends the child now, and it stays ended."""
        self._stopping.set()
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it to the present life, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Its whole group (it leads its own session) where it is to be no more.
                send = os.killpg if number == signal.SIGKILL else os.kill
                send(self._process.pid, number)

    async def _keep_alive(self) -> None:
        while not self._stopping.is_set():
            me = WorkerRef(name=self.name, incarnation=secrets.token_hex(4))
            started_s = time.monotonic()
            try:
                code, was_ready = await self._live(me)
            finally:
                self.ready.clear()
                remove_files(self._run_dir, me)
                unlink_segments(me)
            if self._stopping.is_set():
                return
            if code == EXIT_CONFIG:
                raise ChildRefused(f"{self.name} cannot work with this configuration")
            await self._recover(me, code, was_ready, time.monotonic() - started_s)

    async def _live(self, me: WorkerRef) -> tuple[int, bool]:
        """One life, from start to end: its exit code, and whether it ever served."""
        self._process = process = await asyncio.create_subprocess_exec(
            *command(self._module, *arguments(self._run_dir, me, self._model)),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=_STDERR,  # stdout is the launcher's own
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher only
        )
        ended = asyncio.create_task(process.wait())
        was_ready = False
        ready = ready_file(self._run_dir, me)
        life = _Life(ready)
        try:
            if self._stopping.is_set():
                self.send_signal(signal.SIGTERM)
            while not ended.done():
                # A file is all that a child shows, so until it is there we look again and again.
                await asyncio.wait({ended}, timeout=_LIFE_POLL_S if was_ready else _READY_POLL_S)
                if ended.done():
                    break
                if not was_ready and ready.exists():
                    was_ready = True
                    self.ready.set()
                    self._log.info("ready", incarnation=me.incarnation, pid=process.pid)
                elif was_ready and life.still_for_s() >= self._frozen_after_s:
                    # Others may be waiting for proof that it writes no more: only its death is.
                    self._log.error("frozen; it is killed", incarnation=me.incarnation)
                    self.send_signal(signal.SIGKILL)
        finally:  # also where the launcher itself is torn down
            self.send_signal(signal.SIGKILL)
            code = await ended
        return code, was_ready

    async def _recover(self, me: WorkerRef, code: int, was_ready: bool, lived_s: float) -> None:
        """Reports a crash and waits out the backoff. Raises Unavailable where it is hopeless."""
        delay_s = self._restarts.next_delay_s(
            lived_s=lived_s, was_ready=was_ready, now_s=time.monotonic()
        )
        how = _how(code)
        if delay_s is None:
            raise Unavailable(f"{self.name} ended again and again, the last time by {how}")
        self._log.error(
            "ended unexpectedly; it will be restarted",
            incarnation=me.incarnation,
            ended_by=how,
            lived_s=round(lived_s, 3),
            restart_in_s=delay_s,
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()


class _Life:
    """Whether a process's event loop turns, by the file that it touches.

    Counts looks, not seconds: where this very process stood still, nobody else can be blamed.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen_ns = 0
        self._looks = 0

    def still_for_s(self) -> float:
        """To be called every `_LIFE_POLL_S`."""
        try:
            seen_ns = self._file.stat().st_mtime_ns
        except FileNotFoundError:  # it is leaving
            return 0.0
        self._looks = 0 if seen_ns != self._seen_ns else self._looks + 1
        self._seen_ns = seen_ns
        return self._looks * _LIFE_POLL_S


def _how(code: int) -> str:
    """An exit status in words; negative is a signal's number."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
