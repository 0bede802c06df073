"""The machine that figures were taken on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """For the JSON beside the figures. The load is that of the minute before."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
