"""Which kernels and which attention an engine computes with: what the machine has, or was told."""

from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from core.errors import ConfigError
from engine.attention import AttentionBackend
from engine.flash.package import FlashUnavailable, find_package
from engine.kernels import Kernels
from engine.native.build import NativeUnavailable, ensure_built
from engine.native.kernels import NativeKernels
from engine.torch_attention import TorchAttention
from engine.torch_kernels import TorchKernels
from engine.triton.kernels import TritonKernels
from engine.triton.runtime import TritonUnavailable, require

_MAX_HEAD_DIM = 256
KernelChoice = Literal["auto", "native", "torch", "triton"]
AttentionChoice = Literal["auto", "torch", "triton", "flash"]
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Needs:
    """What kernels are for."""

    dtype: torch.dtype
    head_dim: int
    grouped_rows: int
    device: torch.device
    block_size: int
    kv_fp8: bool


def choose_kernels(
    choice: KernelChoice,
    dtype: torch.dtype,
    head_dim: int,
    grouped_rows: int = 0,
    *,
    attention: AttentionChoice = "auto",
    device: torch.device = _CPU,
    block_size: int = 16,
    kv_fp8: bool = False,
) -> Kernels:
    """The kernels for `engine.kernels` and `engine.attention`, told in one log line.

    Builds the native ones where nobody has yet. Products of at most `grouped_rows` rows use weights
    as a GGUF file quantises them, where the kernels can. With `auto` torch's take the others' place
    where those cannot be had, and another line says why. What is named and cannot be had raises
    ConfigError. KV in FP8 (`kv_fp8`) is read by every attention but flash's.
    """
    needs = _Needs(dtype, head_dim, grouped_rows, device, block_size, kv_fp8)
    kernels = _kernels(choice, needs, _attention(attention, needs))
    structlog.get_logger().info(
        "kernels_chosen",
        kernels=kernels.name,
        attention=kernels.attention.name,
        device=str(needs.device),
    )
    return kernels


def _kernels(choice: KernelChoice, needs: _Needs, attention: AttentionBackend | None) -> Kernels:
    on_cpu = needs.device.type == "cpu"
    wanted = ("native" if on_cpu else "triton") if choice == "auto" else choice
    try:
        match wanted:
            case "native":
                return _native(needs, attention)
            case "triton":
                return TritonKernels(needs.device, attention)
    except (NativeUnavailable, TritonUnavailable, OSError) as error:
        if choice != "auto":
            raise ConfigError(f"engine.kernels: {choice} ones cannot be had: {error}") from error
        structlog.get_logger().warning("torch_kernels_used", why=str(error))
    return TorchKernels(attention)


def _native(needs: _Needs, attention: AttentionBackend | None) -> Kernels:
    if needs.device.type != "cpu":
        raise NativeUnavailable(f"they compute on a CPU, and engine.device is {needs.device.type}")
    if needs.head_dim > _MAX_HEAD_DIM:
        raise NativeUnavailable(f"heads of {needs.head_dim} dims; they take {_MAX_HEAD_DIM}")
    return NativeKernels(ensure_built(), needs.dtype, needs.grouped_rows, attention)


def _attention(choice: AttentionChoice, needs: _Needs) -> AttentionBackend | None:
    """None: that of the kernels."""
    try:
        match choice:
            case "torch":
                return TorchAttention()
            case "triton":
                require(needs.device)
                from engine.triton.attention import TritonAttention  # brings triton

                return TritonAttention(needs.device)
            case "flash":
                return _flash(needs)
            case "auto" if needs.device.type == "cuda":
                return _flash(needs)
    except (TritonUnavailable, FlashUnavailable) as error:
        if choice != "auto":
            raise ConfigError(f"engine.attention: {choice} cannot be had: {error}") from error
        structlog.get_logger().info("flash_not_used", why=str(error))
    return None


def _flash(needs: _Needs) -> AttentionBackend:
    if needs.kv_fp8:
        raise FlashUnavailable("it reads no KV with a scale for each head (engine.kv_cache_dtype)")
    package = find_package(needs.device)
    package.check(dtype=needs.dtype, head_dim=needs.head_dim, block_size=needs.block_size)
    require(needs.device)  # our own kernel writes the cache
    from engine.flash.attention import FlashAttention  # brings triton

    return FlashAttention(package)
