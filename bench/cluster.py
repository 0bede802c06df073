"""A cluster to measure: `tandem serve` in a process of its own, on free ports."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
# A configuration file's content: scalars, and tables of scalars.
Settings = Mapping[str, Mapping[str, object] | object]

# Every prompt is read by a prefill worker and all of its KV handed over, whatever came before.
ALWAYS_HAND_OVER: Settings = {
    "scheduler": {"local_prefill": "never"},
    "engine": {"prefix_cache": False},
}
_ENDPOINT = re.compile(r"^\s*(HTTP|gRPC|admin)\s+(\S+)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a cluster listens, what its model is called, the file that it logs to, its launcher."""

    http: str
    grpc: str
    admin: str
    model: str
    log: Path
    pid: int | None = None


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[Endpoints]:
    """Serves with these settings (those of a configuration file) until the block ends.

    Raises RuntimeError where the cluster does not come up.
    """
    free_ports = {
        "gateway": {"http_port": 0, "grpc_port": 0},
        "scheduler": {"admin_port": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "tandem.toml", Path(folder) / "log"
        config.write_text(to_toml(merged(free_ports, settings)))
        command = [sys.executable, "-m", "cli.main", "serve", "--config", str(config)]
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            ) as process,
        ):
            try:
                yield _endpoints(process, log)
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _endpoints(process: "subprocess.Popen[str]", log: Path) -> Endpoints:
    assert process.stdout is not None
    found: dict[str, str] = {}
    model = ""
    late = threading.Timer(_START_TIMEOUT_S, process.kill)
    late.start()
    try:
        for line in process.stdout:
            if (match := _ENDPOINT.match(line)) is not None:
                found[match[1]] = match[2]
            elif " is served at" in line:
                model = line.split(" is served at")[0].strip()
            if len(found) == 3:
                return Endpoints(
                    http=found["HTTP"],
                    grpc=found["gRPC"],
                    admin=found["admin"],
                    model=model,
                    log=log,
                    pid=process.pid,
                )
    finally:
        late.cancel()
    raise RuntimeError(f"the cluster did not start: {log.read_text()[-2000:]}")


def merged(settings: Settings, over: Settings) -> dict[str, object]:
    """The settings with others laid over them, table by table."""
    result: dict[str, object] = dict(settings)
    for name, value in over.items():
        below = result.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = {**below, **value}
        result[name] = value
    return result


def to_toml(settings: Settings) -> str:
    """Two levels of TOML, and lists of tables; JSON's scalars and lists are TOML's."""
    plain = {k: v for k, v in settings.items() if not (_is_table(v) or _is_tables(v))}
    lines = _lines(plain)
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"[{name}]", *_lines(value)]
        elif isinstance(value, list) and _is_tables(value):
            for table in value:
                lines += [f"[[{name}]]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, object]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))
