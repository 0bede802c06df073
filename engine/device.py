"""Which device a worker computes on, and what the machine says of it."""

import re
from dataclasses import dataclass
from typing import Literal

import torch

from core.config import ClusterConfig
from engine.preflight import DriverFacts, GpuFacts, check_driver, check_gpus

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """A worker's number among those of its cluster, and how many they are."""

    index: int = 0
    num_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a worker computes. `gpu` is None on a CPU; `sharing` workers take the same GPU."""

    device: torch.device
    gpu: GpuFacts | None = None
    sharing: int = 1


def place_of(name: str, config: ClusterConfig) -> WorkerPlace:
    """The place of a worker by its name: prefill workers first, by the number behind the dash.

    One that was started alone, in a container say, has what GPUs it sees to itself.
    """
    if config.network.schedulers:
        return WorkerPlace()
    number = re.search(r"(\d+)$", name)
    index = int(number[1]) if number else 0
    if name.startswith("decode"):
        index += config.prefill_workers
    return WorkerPlace(index=index, num_workers=config.prefill_workers + config.decode_workers)


def choose_device(choice: Literal["auto", "cpu", "cuda"], place: WorkerPlace) -> Placed:
    """Worker n takes GPU n, round and round. Raises ConfigError where `cuda` cannot be had."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return Placed(device=CPU)
    check_driver(driver_facts())
    gpus = [_facts(index) for index in range(torch.cuda.device_count())]
    check_gpus(gpus[: place.num_workers])
    gpu = gpus[place.index % len(gpus)]
    sharing = len(range(gpu.index, max(place.num_workers, gpu.index + 1), len(gpus)))
    return Placed(device=torch.device("cuda", gpu.index), gpu=gpu, sharing=sharing)


def driver_facts() -> DriverFacts:
    """What torch was built for, and what the driver can run."""
    built_for = None
    if torch.version.cuda is not None:
        major, minor = torch.version.cuda.split(".")[:2]
        built_for = (int(major), int(minor))
    driver = None
    if built_for is not None and (number := _driver_version()):
        driver = (number // 1000, number % 1000 // 10)
    return DriverFacts(torch_version=torch.__version__, built_for=built_for, driver=driver)


def _driver_version() -> int:
    """As CUDA tells it, 1000 * major + 10 * minor; 0 where there is no driver."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)  # in builds with CUDA alone
    return ask() if ask is not None else 0


def _facts(index: int) -> GpuFacts:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return GpuFacts(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
    )
