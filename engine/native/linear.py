"""Matrix products by the native kernels."""

import torch
from torch import Tensor

from engine.linear import release
from engine.native.library import Library

_PANEL = 32  # outputs that lie side by side in a packed weight


class NativeLinear:
    """A weight packed by panels of 32 outputs; see src/linear.cpp.

    Every result is one sum in the order of the inputs, so a row's result has the same bits
    whatever rows are computed with it.
    """

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._out, self._in = weight.shape
        # An odd number of inputs ends in half a word, an uneven number of outputs in empty ones.
        padded = -(-self._out // _PANEL) * _PANEL * (self._in + self._in % 2)
        self._packed = torch.empty(padded, dtype=weight.dtype)
        library.pack(weight.data_ptr(), self._out, self._in, self._packed.data_ptr())
        release(weight)
        self._bias = bias

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        wide = dtype == torch.float32
        out = torch.empty((rows.shape[0], self._out), dtype=dtype or rows.dtype)
        (self._library.linear_f32 if wide else self._library.linear)(
            rows.data_ptr(),
            self._in,
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            self._out,
            rows.shape[0],
            self._out,
            self._in,
            torch.get_num_threads(),
        )
        return out

    def gather(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._out:
            raise IndexError(f"an id outside [0, {self._out})")
        out = torch.empty((ids.shape[0], self._in), dtype=self._packed.dtype)
        self._library.unpack_rows(
            ids.data_ptr(), self._packed.data_ptr(), ids.shape[0], self._in, out.data_ptr()
        )
        return out
