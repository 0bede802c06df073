"""The native kernels as one set: what `engine.kernels.Kernels` asks for, in C++."""

from pathlib import Path

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.grouped import GroupedWeight
from engine.kernels import Linear
from engine.native.attention import NativeAttention
from engine.native.grouped import GroupedLinear, GroupedProducts, fits
from engine.native.library import load_library
from engine.native.linear import NativeLinear


class NativeKernels:
    """For one dtype, bfloat16 or float32. Raises OSError where the library does not load.

    Products of at most `grouped_rows` rows use quantised weights where they are given, in bfloat16.
    `attention` takes the place of its own.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        grouped_rows: int = 0,
        attention: AttentionBackend | None = None,
    ) -> None:
        self._library = load_library(path, dtype)
        self._grouped_rows = grouped_rows if dtype == torch.bfloat16 else 0
        self._products = GroupedProducts(path)
        self.name = "native"
        self.attention: AttentionBackend = attention or NativeAttention(self._library)

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        lookup: bool = False,
        groups: GroupedWeight | None = None,
    ) -> Linear:
        numbers = NativeLinear(self._library, weight, bias)
        if groups is None or not self._grouped_rows or not fits(groups):
            return numbers
        return GroupedLinear(
            self._products, groups, bias, numbers=numbers, max_rows=self._grouped_rows
        )

    def norm(
        self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(hidden)
        self._library.norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *hidden.shape,
            eps,
            torch.get_num_threads(),
        )
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, inner), dtype=gate_up.dtype)
        self._library.swiglu(
            gate_up.data_ptr(), out.data_ptr(), rows, inner, torch.get_num_threads()
        )
        return out
