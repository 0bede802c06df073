"""The kernel sets that this machine has."""

import pytest
import torch

from engine.kernels import Kernels
from engine.native.build import NativeUnavailable, ensure_built
from engine.native.kernels import NativeKernels
from engine.torch_kernels import TorchKernels
from engine.triton.kernels import TritonKernels
from engine.triton.runtime import TritonUnavailable

KERNEL_SETS = ("torch", "native")
DTYPES = (torch.float32, torch.bfloat16)


def make_kernels(name: str, dtype: torch.dtype) -> Kernels:
    """Skips the test where these kernels cannot be had."""
    if name == "torch":
        return TorchKernels()
    try:
        if name == "triton":
            return TritonKernels(torch.device("cpu"))
        return NativeKernels(ensure_built(), dtype)
    except (NativeUnavailable, TritonUnavailable) as error:
        pytest.skip(f"no {name} kernels: {error}")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """For `torch.testing.assert_close` of results that should be of the order of one."""
    return {"atol": 3e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}
