"""Real clusters: `tandem serve` in a process of its own, with the real model and free ports."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Endpoints, Settings, merged, to_toml
from bench.cluster_view import ClusterState, look
from bench.log_events import read_events
from bench.reference import Reference
from bench.streams import StreamClient
from core.config import DEFAULT_MODEL
from core.model_card import ModelCard
from engine.prepare import prepare

_START_TIMEOUT_S = 170.0
_POLL_S = 0.05
_ROLES = ("prefill", "decode")
# Small pools: several clusters fit side by side, and a machine with little shared memory will do.
_SETTINGS: Settings = {
    "log_format": "json",
    "drain_timeout_s": 10.0,
    "gateway": {"http_port": 0, "grpc_port": 0},
    "scheduler": {"admin_port": 0},
    "engine": {"threads": 1, "prefill_kv_bytes": 2**30, "decode_kv_bytes": 2**30},
}


def _eventually(condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(_POLL_S)


class ServedCluster:
    """A running `tandem serve`."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], settings: Settings) -> None:
        self.runtime_dir = folder
        models: Any = settings.get("models", [{}])
        self.num_workers = sum(
            int(str({**settings, **model}.get(f"{r}_workers", 1)))
            for model in models
            for r in _ROLES
        )
        self._out = folder.with_name(f"{folder.name}.out")
        self._err = folder.with_name(f"{folder.name}.err")
        config = folder.with_name(f"{folder.name}.toml")
        config.write_text(to_toml(merged(_SETTINGS, settings)))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", "serve", "--config", str(config), *arguments],
                env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Until the endpoints are printed. Fails with what the cluster said where it ended."""

        def settled() -> bool:
            return "Ctrl-C" in self._out.read_text() or self.process.poll() is not None

        _eventually(settled, "the cluster is up", timeout_s=_START_TIMEOUT_S)
        if self.process.poll() is not None:
            pytest.fail(f"exit code {self.process.returncode}: {self.stderr}")

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def run_dir(self) -> Path:
        (found,) = self.runtime_dir.glob("tandem-*")
        return found

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self._port('gateway', 'http')}"

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self._port('gateway', 'grpc')}"

    def client(self) -> StreamClient:
        """A client of the gateway, to be used in a `with` block."""
        return StreamClient(self.grpc_target)

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self._port('scheduler', 'admin')}"

    @property
    def endpoints(self) -> Endpoints:
        """The same as `bench` sees a cluster."""
        return Endpoints(
            http=f"{self.http_url}/v1",
            grpc=self.grpc_target,
            admin=self.admin_url,
            model=DEFAULT_MODEL,
            log=self._err,
        )

    def _port(self, process: str, name: str) -> int:
        return int(json.loads((self.run_dir / f"{process}.json").read_text())[name])

    def events(self, name: str) -> list[dict[str, Any]]:
        """The lines of this name that any process has logged, in order."""
        return read_events(self._err, name)

    def lives(self) -> list[tuple[str, str, int]]:
        """(process, incarnation, pid) of each life that came to serve, in order."""
        return [
            (event["child"], event["incarnation"], event["pid"])
            for event in self.events("ready")
            if event["process"] == "launcher"
        ]

    def pids(self) -> dict[str, int]:
        """The process ids of the present lives."""
        return {name: pid for name, _, pid in self.lives()}

    def has_replaced(self, name: str, pid: int) -> bool:
        """Whether a later life of this child serves. Others may have come meanwhile."""
        return self.pids()[name] != pid

    def state(self) -> ClusterState:
        """What the scheduler knows now."""
        return look(self.admin_url)

    def is_at_rest(self) -> bool:
        """Whether every worker is there with all its blocks free, and nothing is placed."""
        try:
            return self.state().at_rest(self.num_workers)
        except (OSError, ValueError, httpx.HTTPError):  # the scheduler is starting
            return False

    def segments(self) -> list[str]:
        """The shared-memory segments of any life of this cluster. Others may run beside it."""
        incarnations = [incarnation for _, incarnation, _ in self.lives()]
        return [
            path.name
            for path in Path("/dev/shm").glob("tandem-*")
            if any(incarnation in path.name for incarnation in incarnations)
        ]

    def ask(self, text: str, *, max_tokens: int = 16, timeout_s: float = 60.0) -> str:
        """A greedy answer."""
        response = httpx.post(
            f"{self.http_url}/v1/chat/completions",
            json={
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": max_tokens,
            },
            timeout=timeout_s,
            trust_env=False,
        )
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def stop(self, number: signal.Signals = signal.SIGTERM, *, timeout_s: float = 60.0) -> int:
        """Asks it to stop and gives its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=timeout_s)

    def close(self) -> None:
        """For teardown: whatever state it is in, it is gone afterwards."""
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=10)


StartCluster = Callable[..., ServedCluster]


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Waits for something in another process that no event tells of, with a deadline."""
    return _eventually


@pytest.fixture(scope="session")
def start_cluster() -> Iterator[StartCluster]:
    """Starts `tandem serve` with more arguments and waits until it serves.

    `dtype` may be given, and `settings`: tables laid over those that all clusters have. With
    `ready=False` it does not wait. Every cluster started is stopped at the session's end.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as parent:  # short, as a socket's path must be
        started: list[ServedCluster] = []

        def start(
            *arguments: str,
            dtype: str = "float32",
            settings: Settings | None = None,
            ready: bool = True,
        ) -> ServedCluster:
            folder = Path(parent) / str(len(started))
            folder.mkdir()
            chosen = merged({"engine": {"dtype": dtype}}, settings or {})
            cluster = ServedCluster(folder, arguments, chosen)
            started.append(cluster)
            if ready:
                cluster.await_ready()
            return cluster

        yield start
        for cluster in started:
            cluster.close()


@pytest.fixture(scope="session")
def cluster(start_cluster: StartCluster) -> ServedCluster:
    """For tests that leave a cluster as they found it: float32, one worker of each kind."""
    return start_cluster()


@pytest.fixture(scope="session")
def card() -> ModelCard:
    """The default model's card, from the user's cache."""
    return prepare(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def reference(card: ModelCard) -> Reference:
    """The default model as transformers reads and computes it."""
    return Reference.from_gguf(Path(card.source))


@pytest.fixture(scope="session")
def encode(card: ModelCard) -> Callable[[str], list[int]]:
    """The default model's token ids of a text, control tokens where the text names them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    return lambda text: list(tokenizer.encode(text).ids)
