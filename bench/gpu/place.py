"""Where the checks run, and how large what they compute is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.graphs import Capture, CudaCapture
from engine.model_config import ModelConfig

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    vocab_size=128_256,
    tie_embeddings=False,
    context_window=131_072,
)
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope_theta=1000.0,
    rms_norm_eps=1e-5,
    vocab_size=97,
    tie_embeddings=False,
    context_window=512,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A GPU with an 8B-shaped model; or, dry, a CPU with a small one through the same functions."""

    device: torch.device
    model: ModelConfig  # whose steps are timed
    batch: int
    context: int
    prompt: int
    copied_blocks: int
    tries: int

    @property
    def dry(self) -> bool:
        return self.device.type == "cpu"

    def settle(self) -> None:
        """Waits for what was launched."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def capture(self) -> Capture:
        """CUDA's graphs; dry, recordings that replay by calling again."""
        return _recorded if self.dry else CudaCapture()


def gpu_place() -> Place:
    """The first GPU."""
    return Place(
        device=torch.device("cuda", 0),
        model=LLAMA_8B,
        batch=32,
        context=1024,
        prompt=2048,
        copied_blocks=512,
        tries=20,
    )


def dry_place() -> Place:
    """No GPU: sizes at which nothing takes long, and no number means anything."""
    return Place(
        device=torch.device("cpu"),
        model=SMALL,
        batch=2,
        context=20,
        prompt=24,
        copied_blocks=3,
        tries=1,
    )


def _recorded(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return work
