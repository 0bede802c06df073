"""Which ports a process takes: those that were chosen, else those of its life before, else any.

One launcher's processes count from the ports that the configuration names. A process that was
started alone takes them as they are. What it has bound, each process writes to a file in the run
directory, so that its launcher can tell, and its next life takes the same.
"""

import json
from pathlib import Path

from core.config import ClusterConfig
from core.process import SCHEDULER_NAME

GATEWAY_NAME = "gateway"


def gateway_name(number: int) -> str:
    """gateway, gateway-1, gateway-2 and so on."""
    return f"{GATEWAY_NAME}-{number}" if number else GATEWAY_NAME


def public_ports_of(config: ClusterConfig, process: str) -> dict[str, int]:
    """The gateway's ports by name, `http` and `grpc`; 0: any free one."""
    offset = 0 if config.network.schedulers else _number(process)
    chosen = {"http": config.gateway.http_port, "grpc": config.gateway.grpc_port}
    return {name: port + offset if port else 0 for name, port in chosen.items()}


def admin_port_of(config: ClusterConfig, process: str) -> int:
    """The admin port of the process of this name, such as decode-1; 0: any free one.

    Gateways come first, then prefill workers, then decode workers. The scheduler has its own.
    """
    first = config.telemetry.admin_port
    if first == 0 or config.network.schedulers:
        return first
    role = process.partition("-")[0]
    before = {
        GATEWAY_NAME: 0,
        "prefill": config.gateways,
        "decode": config.gateways + config.num_workers[0],
    }
    return first + before[role] + _number(process)


def scheduler_names(config: ClusterConfig) -> list[str]:
    """Of one launcher's: scheduler, scheduler-1 and so on."""
    others = (f"{SCHEDULER_NAME}-{number}" for number in range(1, config.schedulers))
    return [SCHEDULER_NAME, *others]


def scheduler_admin_port_of(config: ClusterConfig, process: str) -> int:
    """The first scheduler's is configured, those of the others follow it; 0: any free one."""
    first = config.scheduler.admin_port
    return first if first == 0 or config.network.schedulers else first + _number(process)


def _number(process: str) -> int:
    return int(process.partition("-")[2] or 0)


def tell_ports(run_dir: Path, process: str, bound: dict[str, int]) -> None:
    """Writes what a process has bound; what it told before under other names stays."""
    file = _file(run_dir, process)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(told_ports(run_dir, process) | bound))
    partial.replace(file)


def told_ports(run_dir: Path, process: str) -> dict[str, int]:
    """What a process has bound, in this life or the one before; nothing where it tells nothing."""
    try:
        ports: dict[str, int] = json.loads(_file(run_dir, process).read_text())
    except (OSError, ValueError):
        return {}
    return ports


def _file(run_dir: Path, process: str) -> Path:
    return run_dir / f"{process}.json"
