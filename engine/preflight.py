"""What can be known of a GPU before weights are loaded: one clear line where they should not be.

Everything here is pure; `engine.device` reads the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError
from engine.model_config import ModelConfig

# Triton's kernels multiply bfloat16 from here on.
LEAST_CAPABILITY = (8, 0)
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU that the process may use."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, compute capability {_dotted(self.capability)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The CUDA versions that meet; None where torch has none, or where there is no driver."""

    torch_version: str
    built_for: tuple[int, int] | None
    driver: tuple[int, int] | None


def check_driver(facts: DriverFacts) -> None:
    """Raises ConfigError where torch cannot use a GPU here. A driver runs what its major is for."""
    if facts.built_for is None:
        raise ConfigError(
            f"engine.device: torch {facts.torch_version} is built without CUDA "
            "(deploy/requirements-gpu.txt has a build with it)"
        )
    if facts.driver is None:
        raise ConfigError("engine.device: there is no NVIDIA driver, or it shows no GPU")
    if facts.driver[0] < facts.built_for[0]:
        raise ConfigError(
            f"engine.device: the NVIDIA driver is too old: it has CUDA {_dotted(facts.driver)}, "
            f"and torch {facts.torch_version} needs CUDA {facts.built_for[0]}.0"
        )


def check_gpus(gpus: Sequence[GpuFacts]) -> None:
    """Raises ConfigError where the GPUs that the workers take are too old, or not alike.

    Unlike ones round differently: a request would get other tokens from another worker.
    """
    if not gpus:
        raise ConfigError("engine.device: there is no GPU here")
    for gpu in gpus:
        if gpu.capability < LEAST_CAPABILITY:
            raise ConfigError(
                f"engine.device: {gpu} is too old; {_dotted(LEAST_CAPABILITY)} is the least"
            )
        if gpu.capability != gpus[0].capability:
            raise ConfigError(
                f"engine.device: mixed compute capabilities: {gpus[0]} and {gpu}; "
                "CUDA_VISIBLE_DEVICES chooses those that are alike"
            )


def weight_bytes(config: ModelConfig, item_bytes: int, matrix_bytes: int | None = None) -> int:
    """Of all weights: `item_bytes` a number, `matrix_bytes` those of the layers' matrices."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    matrices = (q_rows + 2 * kv_rows) * hidden + hidden * q_rows + 3 * hidden * inner
    layer = 2 * hidden
    layer += (q_rows + 2 * kv_rows) * config.qkv_bias + hidden * config.output_bias
    layer += (2 * inner + hidden) * config.mlp_bias + 2 * dim * config.qk_norm
    tables = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    others = (config.num_layers * layer + tables + hidden) * item_bytes
    return others + config.num_layers * matrices * (matrix_bytes or item_bytes)


def check_memory(
    gpu: GpuFacts, *, model_bytes: int, window_kv_bytes: int, share: float, num_workers: int
) -> None:
    """Raises ConfigError where the model and the KV of one whole window have no room.

    `share` of the GPU's memory is for the `num_workers` of this cluster that take it.
    """
    budget = min(int(gpu.total_bytes * share) // num_workers, gpu.free_bytes)
    if model_bytes + window_kv_bytes > budget:
        raise ConfigError(
            f"engine.device: {gpu} is too small: {_gib(model_bytes)} of weights and "
            f"{_gib(window_kv_bytes)} of KV for one window, and a worker gets {_gib(budget)} "
            f"({share:g} of {_gib(gpu.total_bytes)} for {num_workers} "
            f"worker{'s' if num_workers > 1 else ''}, {_gib(gpu.free_bytes)} free): "
            "lower engine.max_model_len, or take fewer workers or larger GPUs"
        )


def pool_bytes(gpu: GpuFacts, *, used_bytes: int, share: float, num_workers: int) -> int:
    """What is left for the KV pool of a worker that holds `used_bytes` at its step's peak.

    `gpu.free_bytes` is what was free before the worker took anything.
    """
    budget = min(int(gpu.total_bytes * share) // num_workers, gpu.free_bytes)
    return max(0, budget - used_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
