"""Processes of one cluster, each started by `tandem run` and a command of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.cluster import merged, to_toml
from bench.log_events import read_events

ROLES = ("scheduler", "prefill", "decode", "gateway")


def free_ports(count: int) -> list[int]:
    """So many ports that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class SeparateProcesses:
    """They are told to stop at the end of the block, and have to end well."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        http, admin, scheduler = free_ports(3)
        self.settings: dict[str, Any] = merged(
            {
                "drain_timeout_s": 5.0,
                "log_format": "json",
                "gateway": {"http_port": http, "grpc_port": 0},
                "scheduler": {"admin_port": admin, "local_prefill": "never"},
                "engine": {
                    "dtype": "float32",
                    "threads": 1,
                    "prefill_kv_bytes": 2**28,
                    "decode_kv_bytes": 2**28,
                },
                "transfer": {"transport": "tcp"},
                "network": {"schedulers": [f"127.0.0.1:{scheduler}"]},
            },
            dict(settings or {}),
        )
        self.gateway_url = f"http://127.0.0.1:{http}"
        self.admin_url = f"http://127.0.0.1:{admin}"
        self._secret = folder / "secret"
        self._secret.write_text("a secret that all of them share")
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, name: str, over: Mapping[str, Any] | None = None) -> None:
        """Starts one process, with settings laid over the others'."""
        config = self._folder / f"{name}.toml"
        config.write_text(to_toml(merged(self.settings, dict(over or {}))))
        command = [sys.executable, "-m", "cli.main", "run", role]
        with self._log(name).open("w") as log:
            self._running.append(
                subprocess.Popen(
                    [*command, "--config", str(config), "--name", name],
                    env={**os.environ, "TANDEM__SECRET_FILE": str(self._secret)},
                    stderr=log,
                )
            )

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The lines of this event that the process has logged."""
        return read_events(self._log(name), event)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        try:
            codes = [process.wait(timeout=120) for process in self._running]
        finally:
            for process in self._running:
                process.kill()
        if error is None:
            assert codes == [0] * len(codes)


def answers(url: str) -> bool:
    """Whether 200 comes from there."""
    try:  # without `verify=False` each call reads this machine's CAs, and this is asked often
        return httpx.get(url, timeout=20, trust_env=False, verify=False).status_code == 200
    except httpx.HTTPError:
        return False
