"""`python -m deploy.healthcheck`: 0 where every process of this user's clusters here is alive.

For a container's health check. Processes write the ports of their admin servers into the run
directory; each is asked whether it is alive (`/livez`), which a frozen one does not answer. Imports
nothing but the standard library: it runs every few seconds.
"""

import http.client
import json
import os
import sys
import tempfile
from pathlib import Path

_TIMEOUT_S = 2.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_DEFAULT_HOST = "127.0.0.1"
_SCHEDULER = "scheduler"


def not_alive() -> str | None:
    """Which process is not, and why; None where all are. Nobody there is a reason, too."""
    asked = 0
    for run_dir in _run_dirs():
        settings = json.loads((run_dir / "cluster.json").read_text())
        for file in sorted(run_dir.glob("*.json")):
            port = json.loads(file.read_text()).get("admin")
            if file.name == "cluster.json" or port is None:
                continue
            section = "scheduler" if file.stem.startswith(_SCHEDULER) else "telemetry"
            # Only what was chosen is in the file.
            host = settings.get(section, {}).get("admin_host", _DEFAULT_HOST)
            why = _ask(_WILDCARDS.get(host, host), port)
            if why is not None:
                return f"{file.stem}: {why}"
            asked += 1
    return None if asked else "no process has come up yet"


def _run_dirs() -> list[Path]:
    parents = {os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()}
    found = [each for parent in parents if parent for each in Path(parent).glob("tandem-*")]
    ours = [each for each in found if each.stat().st_uid == os.getuid()]
    return [each for each in ours if (each / "cluster.json").exists()]


def _ask(host: str, port: int) -> str | None:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/livez")
        response = connection.getresponse()
        if response.status != http.client.OK:
            return str(json.loads(response.read()).get("reason", response.status))
    except OSError as error:
        return f"no answer from {host}:{port}: {error}"
    finally:
        connection.close()
    return None


if __name__ == "__main__":
    sys.exit(not_alive())
