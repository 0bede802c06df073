"""The kernels that run wherever torch does."""

import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionBackend
from engine.grouped import GroupedWeight
from engine.kernels import Linear
from engine.linear import torch_linear
from engine.torch_attention import TorchAttention


class TorchKernels:
    """Plain torch, with oneDNN's packed weights in bfloat16 where there are any.

    `attention` takes the place of its own.
    """

    def __init__(self, attention: AttentionBackend | None = None) -> None:
        self.name = "torch"
        self.attention: AttentionBackend = attention or TorchAttention()

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        lookup: bool = False,
        groups: GroupedWeight | None = None,
    ) -> Linear:
        return torch_linear(weight, bias, lookup=lookup)

    def norm(
        self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        if delta is not None:
            hidden += delta
        return F.rms_norm(hidden, weight.shape, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
