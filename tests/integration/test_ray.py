"""A cluster on Ray: it serves, a node that dies takes nothing with it, workers come and go.

Ray's own nodes are made here, several on this machine, and ended one by one.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from bench.cluster import ALWAYS_HAND_OVER, merged, to_toml
from bench.log_events import read_events
from bench.streams import StreamClient, generate

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="the extra ray is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

MODEL = "smollm2-135m-instruct"
START_S = 400.0
NUM_STREAMS = 8
ANSWER_TOKENS = 150
BASE = merged(
    ALWAYS_HAND_OVER,
    {
        "log_format": "json",
        "gateway": {"http_port": 0, "grpc_port": 0},
        "scheduler": {"admin_port": 0, "report_interval_s": 0.1},
        "telemetry": {"admin_port": 0},
        "engine": {
            "dtype": "float32",
            "prefill_kv_bytes": 2**28,
            "decode_kv_bytes": 2**28,
        },
    },
)


@dataclass
class Nodes:
    """Ray's head, and a node for each worker."""

    folder: Path
    cluster: Any
    workers: list[Any] = field(default_factory=list)
    served: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add(self) -> None:
        self.workers.append(self.cluster.add_node(num_cpus=1))

    def kill_node_of(self, pid: int) -> None:
        """Ends the node whose actor supervises this process."""
        mine = _ancestors(pid)
        for node in self.workers:
            raylet = node.all_processes["raylet"][0].process.pid
            if raylet in mine:
                self.workers.remove(node)
                self.cluster.remove_node(node, allow_graceful=False)
                return
        raise LookupError(f"no node has process {pid}")


class Served:
    """`tandem serve --on ray`, and what it says."""

    def __init__(self, nodes: Nodes, settings: dict[str, object], eventually: Any) -> None:
        number = len(nodes.served)
        config = nodes.folder / f"{number}.toml"
        config.write_text(to_toml(merged(BASE, settings)))
        self._out, self._err = nodes.folder / f"{number}.out", nodes.folder / f"{number}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cli.main", "serve", "--on", "ray"),
                    *("--address", nodes.cluster.address, "--config", str(config)),
                ],
                stdout=out,
                stderr=err,
            )
        nodes.served.append(self.process)
        eventually(
            lambda: "Ctrl-C" in self.out or self.process.poll() is not None,
            "it serves",
            timeout_s=START_S,
        )
        assert self.process.poll() is None, self._err.read_text()[-2000:]

    @property
    def out(self) -> str:
        return self._out.read_text()

    def where(self, what: str) -> str:
        found = re.search(rf"^\s*{what}\s+(\S+)$", self.out, re.MULTILINE)
        assert found is not None, self.out
        return found[1]

    def client(self) -> StreamClient:
        return StreamClient(self.where("gRPC"))

    def workers(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.where('admin')}/cluster", timeout=30, trust_env=False)
        return list(answer.json()["workers"])

    def names(self) -> list[str]:
        return sorted(each["worker"].partition("/")[0] for each in self.workers())

    def pid_of(self, name: str) -> int:
        """Of the worker's present life, by the command that it runs."""
        (incarnation,) = (
            each["worker"].partition("/")[2]
            for each in self.workers()
            if each["worker"].startswith(f"{name}/")
        )
        (pid,) = (pid for pid, command in _commands() if incarnation in command)
        return pid

    def events(self, name: str) -> list[dict[str, Any]]:
        return read_events(self._err, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever became of a test, the next one has all nodes to itself."""
        if self.process.poll() is None:
            self.stop()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=180)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("ray")
    run = Path("/tmp") / f"t-ray-{os.getpid()}"  # short, as a socket's path must be
    run.mkdir()
    # Ray runs actors at nice 15: on two cores that work, those would never come up.
    given = {"XDG_RUNTIME_DIR": str(run), "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        made = Nodes(
            folder=folder,
            cluster=ray_cluster.Cluster(
                initialize_head=True,
                connect=False,
                head_node_args={"num_cpus": 0, "include_dashboard": False},
            ),
        )
        try:
            for _ in range(4):
                made.add()
            yield made
        finally:
            for process in made.served:
                if process.poll() is None:
                    process.kill()
                    process.wait(10)
            made.cluster.shutdown()
    assert [command for _, command in _commands() if str(run) in command] == []
    assert list(run.glob("tandem-*")) == [], "every run directory is gone"
    run.rmdir()


def ask(number: int):
    return generate(
        MODEL,
        list(range(100 + 20 * number, 120 + 20 * number)),
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        temperature=0.8,
        top_k=20,
        seed=number,
    )


def test_a_node_that_dies_with_a_decode_worker_costs_no_stream_and_no_token(nodes, eventually):
    settings = {"prefill_workers": 1, "decode_workers": 2}
    with Served(nodes, settings, eventually) as served:
        _loses_a_node(nodes, served, eventually)
        assert served.stop() == 0


def _loses_a_node(nodes, served, eventually):
    assert served.names() == ["decode-0", "decode-1", "prefill-0"]
    asks = [ask(number) for number in range(NUM_STREAMS)]
    with served.client() as client:
        expected = [stream.token_ids for stream in client.answer_all(asks)]
        assert [len(tokens) for tokens in expected] == [ANSWER_TOKENS] * NUM_STREAMS

        streams = [client.start(each) for each in asks]
        eventually(
            lambda: all(len(stream.token_ids) >= 3 for stream in streams),
            "every stream has begun",
            timeout_s=120,
        )
        victim = max(served.workers(), key=lambda w: (w["role"] == "decode", w["num_running"]))
        name, _, incarnation = victim["worker"].partition("/")
        nodes.kill_node_of(served.pid_of(name))
        waiting = client.start(ask(NUM_STREAMS))
        assert [stream.wait(240).token_ids for stream in streams] == expected
        assert waiting.wait(240).ok
    eventually(
        lambda: any(
            each["worker"].startswith(f"{name}/") and incarnation not in each["worker"]
            for each in served.workers()
        ),
        "it is back on another node, in a new incarnation",
        timeout_s=300,
    )


def test_workers_are_added_and_leave_as_the_bounds_want(nodes, eventually):
    """Three are started where two may be, and one reads where two must."""
    settings = {
        "prefill_workers": 1,
        "decode_workers": 2,
        "ray": {"autoscale": True, "placement": "pack"},
        "scheduler": {"max_decode_workers": 1, "min_prefill_workers": 2},
    }
    while len(nodes.workers) < 4:
        nodes.add()
    with Served(nodes, settings, eventually) as served:
        _adds_and_removes(served, eventually)
        assert served.stop() == 0


def _adds_and_removes(served, eventually):
    asks = [ask(number) for number in range(NUM_STREAMS)]
    with served.client() as client:
        streams = [client.start(each) for each in asks]
        eventually(
            lambda: [name[:3] for name in served.names()] == ["dec", "pre", "pre"],
            "one of the decode workers has left, and a prefill worker has come",
            timeout_s=300,
        )
        assert all(stream.wait(240).ok for stream in streams), "nobody noticed"
    assert len(served.events("one worker less is wanted")) == 1


def test_where_nobody_listens_it_says_so_at_once():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cli.main", "serve", "--on", "ray"),
            *("--address", "127.0.0.1:1", "--prefill", "1", "--decode", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert "no Ray at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def _commands() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield int(entry.parent.name), entry.read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
        found.append(pid)
    return found
