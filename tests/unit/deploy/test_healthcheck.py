"""A container's health check: every process here is asked."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from core.config import ClusterConfig, GatewayConfig, TelemetryConfig
from deploy.healthcheck import not_alive

Tell = Callable[[str, int], None]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Says what port a process has bound."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    run_dir = tmp_path / "tandem-a"
    run_dir.mkdir()
    telemetry = TelemetryConfig(admin_host="0.0.0.0")
    ClusterConfig(gateway=GatewayConfig(insecure=True), telemetry=telemetry).store(run_dir)

    def write(process: str, port: int) -> None:
        (run_dir / f"{process}.json").write_text(json.dumps({"admin": port}))

    return write


@pytest.fixture
def admin() -> Iterator[Callable[[int, str], int]]:
    """Starts an admin server that answers so; gives its port."""
    servers: list[HTTPServer] = []

    def start(status: int, reason: str) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps({"reason": reason}).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_all_is_well_where_every_process_says_so(tell, admin):
    assert not_alive() == "no process has come up yet"
    tell("scheduler", admin(200, ""))
    tell("decode-0", admin(200, ""))
    assert not_alive() is None


def test_one_that_stands_still_or_does_not_answer_is_named(tell, admin):
    tell("scheduler", admin(200, ""))
    tell("decode-0", admin(503, "the step loop stands still"))
    assert not_alive() == "decode-0: the step loop stands still"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        tell("decode-0", closed.getsockname()[1])
        assert (not_alive() or "").startswith("decode-0: no answer from 127.0.0.1:")


def test_as_a_command_it_says_why_and_fails(tell, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "deploy.healthcheck"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "no process has come up yet"
