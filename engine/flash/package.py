"""Which flash-attention package is installed, and how it wants to be called.

Three carry the same kernels under signatures of their own: vllm-flash-attn, the copy inside vLLM,
and flash-attn. None is a requirement of this project: each release of theirs needs one of torch.
Source: https://github.com/Dao-AILab/flash-attention and https://github.com/vllm-project/flash-attention.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

NAMES = ("vllm_flash_attn", "vllm.vllm_flash_attn", "flash_attn")
_MAX_HEAD_DIM = 256
_LEAST_CAPABILITY = (8, 0)
# Tokens that a block must have a multiple of.
_BLOCK_MULTIPLE = {"vllm_flash_attn": 16, "vllm.vllm_flash_attn": 16, "flash_attn": 256}


class FlashUnavailable(Exception):
    """Why not, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPackage:
    """A package's functions. `with_kvcache` is None where it has none: `varlen` serves decodes."""

    name: str
    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any] | None
    # Whether contexts of paged keys are told as lengths; else as cumulative lengths.
    takes_lengths: bool
    block_multiple: int
    extra: dict[str, Any]  # arguments that its newer versions want

    def check(self, *, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
        """Raises FlashUnavailable that names what it cannot compute."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise FlashUnavailable(f"it computes in 16 bits; engine.dtype is {_short(dtype)}")
        if head_dim > _MAX_HEAD_DIM or head_dim % 8:
            raise FlashUnavailable(
                f"heads of {head_dim} dims; it takes multiples of 8 up to {_MAX_HEAD_DIM}"
            )
        if block_size % self.block_multiple:
            raise FlashUnavailable(
                f"{self.name} takes blocks of a multiple of {self.block_multiple} tokens; "
                f"engine.block_size is {block_size}"
            )


def find_package(device: torch.device) -> FlashPackage:
    """The first package that can be imported. Raises FlashUnavailable that says why none can."""
    if device.type != "cuda":
        raise FlashUnavailable("it needs a GPU")
    if not torch.cuda.is_available():
        raise FlashUnavailable("torch sees no GPU here")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise FlashUnavailable(
            "it needs compute capability {}.{}; this GPU has {}.{}".format(
                *_LEAST_CAPABILITY, *capability
            )
        )
    reasons = []
    for name in NAMES:
        try:
            return describe(name, importlib.import_module(name))
        except Exception as error:  # an extension built for another torch fails in its own ways
            reasons.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    raise FlashUnavailable("; ".join(reasons))


def describe(name: str, module: ModuleType) -> FlashPackage:
    """What this module's functions want, by their signatures. Raises AttributeError."""
    varlen = module.flash_attn_varlen_func
    parameters = inspect.signature(varlen).parameters
    extra: dict[str, Any] = {}
    if "fa_version" in parameters:
        extra["fa_version"] = 3 if module.is_fa_version_supported(3) else 2
    return FlashPackage(
        name=name,
        varlen=varlen,
        with_kvcache=getattr(module, "flash_attn_with_kvcache", None),
        takes_lengths="seqused_k" in parameters,
        block_multiple=_BLOCK_MULTIPLE[name],
        extra=extra,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
