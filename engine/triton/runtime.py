"""Whether Triton's kernels can run here, and how.

Triton reads TRITON_INTERPRET when it is imported: with it, every kernel of the process runs in the
interpreter, on tensors in host memory, slowly. That is how the kernels are tested without a GPU.
"""

import importlib.util
import os

import torch

# Tiles' sides must be powers of two; this one is the least that tensor cores take.
MIN_TILE = 16


class TritonUnavailable(Exception):
    """Why not, in one line."""


def interpreted() -> bool:
    """Whether kernels run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def require(device: torch.device) -> None:
    """Raises TritonUnavailable where kernels cannot run on tensors of `device`."""
    if importlib.util.find_spec("triton") is None:
        raise TritonUnavailable("the package triton is not installed")
    if device.type == "cpu" and not interpreted():
        raise TritonUnavailable("Triton needs a GPU; in its interpreter (TRITON_INTERPRET=1) none")
    if device.type != "cpu" and interpreted():
        raise TritonUnavailable("TRITON_INTERPRET is set, and the interpreter has no GPU")


def tile(size: int) -> int:
    """The least power of two that holds `size`."""
    return 1 << max(0, size - 1).bit_length()


def per_program(size: int, wanted: int) -> int:
    """How much of `size` one program takes: `wanted`; all of it in the interpreter.

    There a program costs more than what it computes.
    """
    return tile(size) if interpreted() else wanted
