"""Products and tables of which each rank has a part.

A layer's first matrices (query, key, value; gate, up) are cut by outputs: every rank computes its
heads and its inner columns from the same hidden states. Its second ones (output, down) are cut by
inputs, and what the ranks make of theirs is summed, so that all have the same hidden states again.
Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels import Linear
from engine.parallel.group import RankGroup


class SummedLinear:
    """A weight of which each rank has some inputs. Its bias is in one rank's part."""

    def __init__(self, part: Linear, group: RankGroup) -> None:
        self._part = part
        self._group = group

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = self._part(rows, dtype)
        self._group.sum_(out)
        return out

    def gather(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("a row of it is with several ranks")


class SharedTable:
    """The embedding table: each rank looks up the words that are its own."""

    def __init__(
        self, lookup: Callable[[Tensor], Tensor], num_words: int, group: RankGroup
    ) -> None:
        """`lookup` takes ids in [0, num_words), of this rank's words."""
        self._lookup = lookup
        self._num_words = num_words
        self._group = group

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self._group.shard.rank * self._num_words
        elsewhere = (own < 0) | (own >= self._num_words)
        rows = self._lookup(own.masked_fill(elsewhere, 0))
        rows[elsewhere] = 0
        self._group.sum_(rows)
        return rows


class GatheredHead:
    """The output projection: each rank computes its words' logits, and rank 0 gets all."""

    def __init__(self, part: Linear, vocab_size: int, group: RankGroup) -> None:
        self._part = part
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, rows: Tensor) -> Tensor:
        """float32 [rows, vocab] on rank 0, [rows, 0] on the others."""
        part = self._part(rows, torch.float32)
        whole = self._group.gather(part)
        return part[:, :0] if whole is None else whole[:, : self._vocab_size].contiguous()
