"""Starts the load balancers of deploy/lb on ports of one's own."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "lb"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A load balancer: its file, and its command line behind the program's name.

    FOLDER and FILE stand for a folder of its own, and for the file with the ports put in.
    """

    file: str
    arguments: tuple[str, ...]


PROGRAMS = {
    "envoy": Program(
        file="envoy.yaml",
        arguments=(
            *("--config-path", "FILE", "--log-level", "error", "--disable-hot-restart"),
            *("--concurrency", "1"),
        ),
    ),
    "haproxy": Program(file="haproxy.cfg", arguments=("-db", "-f", "FILE")),
    "nginx": Program(file="nginx.conf", arguments=("-p", "FOLDER", "-c", "FILE")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancer:
    """One that runs."""

    http: int
    grpc: int
    pid: int
    log: Path


def installed(name: str) -> str | None:
    """The program's path; None where it is not to be had."""
    beside = Path(sys.prefix) / "deploy" / "bin" / name
    return str(beside) if beside.exists() else shutil.which(name)


@contextlib.contextmanager
def balancing(name: str, *, http: Sequence[int], grpc: Sequence[int]) -> Iterator[Balancer]:
    """Runs the load balancer before two gateways on these ports, until the block ends.

    Raises RuntimeError where it does not come up, FileNotFoundError where it is not installed.
    """
    binary = installed(name)
    if binary is None:
        raise FileNotFoundError(f"{name} is not installed")
    program = PROGRAMS[name]
    own_http, own_grpc, own_admin = free_ports(3)
    ports = {
        **{"8000": own_http, "50051": own_grpc, "9901": own_admin},
        **dict(zip(("8100", "8101"), http, strict=True)),
        **dict(zip(("50151", "50152"), grpc, strict=True)),
    }
    text = (_CONFIGS / program.file).read_text()
    text = re.sub(r"\b(8000|8100|8101|50051|50151|50152|9901)\b", lambda m: str(ports[m[1]]), text)
    with tempfile.TemporaryDirectory(prefix="t-lb-") as folder:
        file, log = Path(folder) / program.file, Path(folder) / "log"
        file.write_text(text)
        known = {"FILE": str(file), "FOLDER": folder}
        command = [binary, *(known.get(each, each) for each in program.arguments)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            _await_listening(process, (own_http, own_grpc), log)
            yield Balancer(http=own_http, grpc=own_grpc, pid=process.pid, log=log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def _await_listening(process: "subprocess.Popen[bytes]", ports: Sequence[int], log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    for port in ports:
        while True:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"it did not come up: {log.read_text()[-2000:]}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(_POLL_S)
