"""The environment and the command line of a child process."""

import os
import sys
from pathlib import Path

from core.config import ClusterConfig

# Where the packages lie. First on the children's path, since the package index has distributions
# whose top-level names are the same as ours.
_ROOT = Path(__file__).resolve().parent.parent
_CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE …`. -P keeps the folder that the operator stands in off the path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def light() -> dict[str, str]:
    """For a process that computes nothing with tensors."""
    return _environment(threads=1)


def worker(config: ClusterConfig) -> dict[str, str]:
    """For a prefill or decode worker: its share of the machine's cores."""
    workers = sum(config.num_workers)
    return _environment(config.engine.threads or max(1, available_cores() // workers))


def lone_worker(config: ClusterConfig) -> dict[str, str]:
    """For a worker that has the machine, or its container, to itself."""
    return _environment(config.engine.threads or available_cores())


def available_cores() -> int:
    """The cores that this process may use: its affinity, within its container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPU_LIMIT.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or no limit: the quota reads "max"
        return cores


def _environment(threads: int) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    path = [str(_ROOT), *([inherited] if inherited else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        # Idle compute threads sleep: the workers share the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
