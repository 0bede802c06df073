"""What the forward pass is made of: the contract of the kernels that compute it."""

from typing import Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.grouped import GroupedWeight


class Linear(Protocol):
    """A weight [out, in], in whatever form its kernels like, with its bias."""

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """rows [n, in], contiguous, to [n, out] of `dtype`: that of `rows` unless given."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """Rows of the weight itself, [len(ids), in]: the output projection as embedding table.

        `ids` is int64. Raises IndexError for one that the weight does not have.
        """
        ...


class Kernels(Protocol):
    """One way to compute a decoder on this machine, for one dtype."""

    @property
    def name(self) -> str:
        """For logs and benchmarks."""
        ...

    @property
    def attention(self) -> AttentionBackend: ...

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        lookup: bool = False,
        groups: GroupedWeight | None = None,
    ) -> Linear:
        """Takes `weight` over: it may be packed and its memory released.

        `lookup` says that `gather` will be called. `groups` is the same weight as it was quantised,
        for kernels that have a use for it.
        """
        ...

    def norm(
        self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        """RMSNorm of `hidden` [rows, columns]; `delta` is first added to it, in place."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [rows, 2 * inner] to [rows, inner]."""
        ...
