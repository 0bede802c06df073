"""Attention over the paged KV pool: the contract that every backend keeps.

A backend gets the rows of the merged query, key and value projection as they are. What happens to
them on the way (QK-norm, RoPE, the write to the pool, the attention itself) is its own business,
so that it can do several in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from engine.kv_cache import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One sequence's part of a step: its tokens at positions [start, start + num_tokens)."""

    start: int
    num_tokens: int
    block_ids: tuple[int, ...] = field(repr=False)

    @property
    def context_len(self) -> int:
        """Tokens with KV once this step has written its own."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """RoPE's angles of a step's tokens: dims i and i + D / 2 of each head turn by the i-th."""

    cos: Tensor  # float32 [tokens, D / 2]
    sin: Tensor  # float32 [tokens, D / 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """The RMSNorm that some models put on each query and key head before it turns."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


class StepAttention(Protocol):
    """One step's attention, called once per layer."""

    def __call__(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None = None) -> Tensor:
        """Writes keys and values to the pool and attends causally to each sequence's context.

        qkv is [tokens, (H + 2 K) * D], contiguous, and may be overwritten: query heads, key heads,
        value heads, not yet normed or turned. Returns [tokens, H * D]. The tokens of the step's
        sequences lie one after another, in the order given to `begin`. A slot that the sequence
        has not written is never read: stale numbers of another request cannot reach a result,
        not even as a NaN multiplied by a weight of zero.
        """
        ...


class AttentionBackend(Protocol):
    """Makes a step's attention; what all layers share is computed here, once."""

    @property
    def name(self) -> str:
        """For logs and benchmarks."""
        ...

    def begin(
        self, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation
    ) -> StepAttention: ...
