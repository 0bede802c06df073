"""The Triton kernels as one set; matrix products are torch's, which on a GPU are cuBLAS's."""

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.grouped import GroupedWeight
from engine.kernels import Linear
from engine.linear import TorchLinear
from engine.triton import runtime

_TILE = 1024


class TritonKernels:
    """For tensors on `device`. Raises TritonUnavailable where Triton's kernels cannot run there.

    `attention` takes the place of its own.
    """

    def __init__(self, device: torch.device, attention: AttentionBackend | None = None) -> None:
        runtime.require(device)
        from engine.triton import rows  # brings triton
        from engine.triton.attention import TritonAttention

        self._rows = rows
        self.name = "triton"
        self.attention: AttentionBackend = attention or TritonAttention(device)

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        lookup: bool = False,
        groups: GroupedWeight | None = None,
    ) -> Linear:
        return TorchLinear(weight, bias)

    def norm(
        self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(hidden)
        num_rows, columns = hidden.shape
        if num_rows:
            per_program = runtime.per_program(num_rows, 1)
            self._rows.rms_norm[(-(-num_rows // per_program),)](
                *(hidden, hidden if delta is None else delta, weight, out),
                *(num_rows, columns, eps),
                ROWS=per_program,
                COLUMNS=runtime.tile(columns),
                ADDS=delta is not None,
                BY_BITS=runtime.interpreted(),
            )
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
        if num_rows:
            per_program = runtime.per_program(num_rows * inner, _TILE)
            self._rows.swiglu[(-(-num_rows * inner // per_program),)](
                *(gate_up, out, num_rows * inner, inner),
                TILE=per_program,
                BY_BITS=runtime.interpreted(),
            )
        return out
