"""The arms of a comparison: servers that are up already, and servers that are started for it."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from bench.cluster import Settings, serving
from bench.load.client import Target, find_target
from bench.process_tree import ProcessTree
from core.errors import InvalidRequest, Unavailable

DEFAULT_READY_PATH = "/v1/models"
_POLL_S = 0.25
_STOP_TIMEOUT_S = 30.0
# A server that takes more than this many cores while nobody asks anything takes it from the others.
_IDLE_CORES = 0.05
_IDLE_LOOK_S = 2.0


@dataclass(slots=True, kw_only=True)
class RunningArm:
    """A server that answers. `idle_cores` is what it takes when nobody asks; None: not known."""

    name: str
    target: Target
    tree: ProcessTree | None = None
    pausable: bool = False
    idle_cores: float | None = None

    def settle(self) -> None:
        """Measures what it takes when idle, and pauses it where that is much and it may be."""
        if self.tree is None:
            return
        before_s = self.tree.cpu_s()
        time.sleep(_IDLE_LOOK_S)
        self.idle_cores = (self.tree.cpu_s() - before_s) / _IDLE_LOOK_S
        self.pausable = self.pausable and self.idle_cores > _IDLE_CORES
        if self.pausable:
            self.tree.signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """While it is loaded: an arm that is paused between its turns goes on."""
        if not self.pausable or self.tree is None:
            yield
            return
        self.tree.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.tree.signal(signal.SIGSTOP)


class Arm(Protocol):
    """Something to measure."""

    @property
    def name(self) -> str: ...

    def up(self) -> AbstractContextManager[RunningArm]:
        """Serves until the block ends. Raises TandemError where it does not come up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlArm:
    """A server that somebody else has started."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)

    @contextlib.contextmanager
    def up(self) -> Iterator[RunningArm]:
        yield RunningArm(name=self.name, target=find_target(self.url, api_key=self.api_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemArm:
    """A cluster of this very code."""

    name: str
    settings: Settings

    @contextlib.contextmanager
    def up(self) -> Iterator[RunningArm]:
        with contextlib.ExitStack() as stack:
            try:
                endpoints = stack.enter_context(serving(self.settings))
            except RuntimeError as error:
                said = str(error).strip().splitlines()
                raise Unavailable(f"{self.name}: {said[-1] if said else error}") from error
            target = find_target(endpoints.http)
            tree = ProcessTree(endpoints.pid) if endpoints.pid is not None else None
            # Not to be paused: its processes would take each other for frozen.
            yield RunningArm(name=self.name, target=target, tree=tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArm:
    """Any server with this API. `{port}` in the shell's command is replaced by a free port."""

    name: str
    command: str
    ready_path: str = DEFAULT_READY_PATH
    start_timeout_s: float = 600.0

    @contextlib.contextmanager
    def up(self) -> Iterator[RunningArm]:
        port = _free_port()
        command = self.command.replace("{port}", str(port))
        with (
            tempfile.TemporaryDirectory() as folder,
            (log := Path(folder) / "log").open("wb") as output,
            subprocess.Popen(
                command,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                self._await_ready(process, port, log)
                target = find_target(f"http://127.0.0.1:{port}")
                tree = ProcessTree(process.pid)
                yield RunningArm(name=self.name, target=target, tree=tree, pausable=True)
            finally:
                _end(process)

    def _await_ready(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        deadline_s = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                said = log.read_text(errors="replace").strip().splitlines()
                last = f": {said[-1]}" if said else ""
                raise Unavailable(
                    f"{self.name} ended with exit code {process.returncode} before it served{last}"
                )
            with contextlib.suppress(httpx.HTTPError):
                url = f"http://127.0.0.1:{port}{self.ready_path}"
                if httpx.get(url, timeout=5.0, trust_env=False).is_success:
                    return
            time.sleep(_POLL_S)
        raise Unavailable(f"{self.name} does not serve after {self.start_timeout_s:g} s")


def parse_url_arm(text: str, api_key: str | None = None) -> UrlArm:
    """Of NAME=URL. Raises InvalidRequest."""
    name, url = _named("--arm", text, "URL")
    return UrlArm(name=name, url=url, api_key=api_key)


def parse_command_arm(text: str, ready_paths: dict[str, str]) -> CommandArm:
    """Of NAME=COMMAND; `ready_paths` says by name what answers once it serves."""
    name, command = _named("--serve", text, "COMMAND")
    if "{port}" not in command:
        raise InvalidRequest(
            f"--serve {name}: the command needs {{port}} where its port goes", field="serve"
        )
    ready_path = ready_paths.get(name, DEFAULT_READY_PATH)
    return CommandArm(name=name, command=command, ready_path=ready_path)


def parse_ready(text: str) -> tuple[str, str]:
    """Of NAME=PATH. Raises InvalidRequest."""
    name, path = _named("--ready", text, "PATH")
    if not path.startswith("/"):
        raise InvalidRequest(f"--ready {text}: the path begins with a slash", field="ready")
    return name, path


def _named(flag: str, text: str, what: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise InvalidRequest(f"{flag} {text} is not NAME={what}", field=flag)
    return name, value


def _free_port() -> int:
    """One that nobody has now; who is quick may still take it before the server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Asks the whole tree to end, then ends it."""
    tree = ProcessTree(process.pid)
    tree.signal(signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    members = tree.pids()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    for pid in members[1:]:  # those that outlived their parent
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
