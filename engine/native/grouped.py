"""Matrix products of a few rows with weights that stay quantised."""

import ctypes
from ctypes import c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.grouped import GroupedKind, GroupedWeight
from engine.kernels import Linear
from engine.native.library import Function

# The kinds by the numbers that src/grouped.cpp has for them.
_NUMBERS = {GroupedKind.Q4_0: 0, GroupedKind.Q4_1: 1, GroupedKind.Q8_0: 2}
_PANEL = 32  # outputs that lie side by side in a packed weight
# Bytes of 32 inputs of a panel: scales, minima where the kind has any, codes.
_GROUP_BYTES = {GroupedKind.Q4_0: 640, GroupedKind.Q4_1: 640, GroupedKind.Q8_0: 1088}


class GroupedProducts:
    """The C functions. Raises OSError where the library does not load."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))

        def function(name: str, *arguments: type) -> Function:
            found = library[f"tandem_{name}_grouped"]
            found.argtypes = arguments
            found.restype = None
            return found

        _p, _l, _i = c_void_p, c_long, c_int
        self.pack = function("pack", _i, _p, _l, _l, _p)
        self.linear = function("linear", _i, _p, _l, _p, _p, _p, _l, _l, _l, _l, _i, _i)


class GroupedLinear:
    """Few rows go through the quantised weight, more through `numbers`, the same in bfloat16.

    The results differ by the rounding of the weights to bfloat16, which the groups are spared.
    """

    def __init__(
        self,
        products: GroupedProducts,
        weight: GroupedWeight,
        bias: Tensor | None,
        *,
        numbers: Linear,
        max_rows: int,
    ) -> None:
        self._linear = products.linear
        self._kind = _NUMBERS[weight.kind]
        self._out, self._in = weight.shape
        size = self._out // _PANEL * (self._in // 32) * _GROUP_BYTES[weight.kind]
        self._packed = torch.empty(size, dtype=torch.uint8)
        products.pack(
            self._kind, weight.rows.ctypes.data, self._out, self._in, self._packed.data_ptr()
        )
        self._bias = bias
        self._numbers = numbers
        self._max_rows = max_rows

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        count = rows.shape[0]
        if count > self._max_rows:
            return self._numbers(rows, dtype)
        out = torch.empty((count, self._out), dtype=dtype or rows.dtype)
        self._linear(
            self._kind,
            rows.data_ptr(),
            self._in,
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            self._out,
            count,
            self._out,
            self._in,
            dtype == torch.float32,
            torch.get_num_threads(),
        )
        return out

    def gather(self, ids: Tensor) -> Tensor:
        return self._numbers.gather(ids)


def fits(weight: GroupedWeight) -> bool:
    """Whether the outputs fill whole panels."""
    return weight.shape[0] % _PANEL == 0
