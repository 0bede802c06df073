"""Attention by flash-attention over the paged pool; our own kernel writes what is new to it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionRow, QkNorm, Rotation, StepAttention
from engine.decode_tensors import (
    DecodeTensors,
    block_table,
    check_blocks,
    slot_mapping,
    to_device,
)
from engine.flash.package import FlashPackage
from engine.kv_cache import KvCache
from engine.triton.writing import turn_and_write


class FlashAttention:
    """Single tokens by `flash_attn_with_kvcache`, prompts' chunks by `flash_attn_varlen_func`.

    A package without the former computes single tokens by the latter, as chunks of one.
    """

    name = "flash"

    def __init__(self, package: FlashPackage) -> None:
        self._package = package

    def begin(self, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation) -> StepAttention:
        check_blocks(rows, kv.spec)
        device, size = kv.pool.device, kv.spec.block_size
        firsts = np.cumsum([0, *(row.num_tokens for row in rows)], dtype=np.int32)
        step = _FlashStep(self._package, kv, to_device(slot_mapping(rows, size), device), rotation)
        singles, chunks = [], list(range(len(rows)))
        if self._package.with_kvcache is not None:
            singles = [i for i in chunks if rows[i].num_tokens == 1]
            chunks = [i for i in chunks if rows[i].num_tokens > 1]
        for chosen, add in ((singles, step.add_decodes), (chunks, step.add_chunks)):
            if not chosen:
                continue
            part = [rows[i] for i in chosen]
            tokens = None  # all of the step's
            if len(part) < len(rows):
                spans = [np.arange(firsts[i], firsts[i + 1], dtype=np.int64) for i in chosen]
                tokens = to_device(np.concatenate(spans), device)
            lengths = np.array([row.context_len for row in part], dtype=np.int32)
            add(
                _Part(
                    tokens=tokens,
                    table=to_device(block_table(part, size), device),
                    context_lens=to_device(lengths, device),
                    cu_seqlens_q=_cumulative([row.num_tokens for row in part], device),
                    cu_seqlens_k=_cumulative(lengths.tolist(), device),
                    longest_q=max(row.num_tokens for row in part),
                    longest_k=int(lengths.max()),
                )
            )
        return step

    def begin_decode(
        self, kv: KvCache, tensors: DecodeTensors, rotation: Rotation
    ) -> StepAttention:
        """Of a step that only decodes, whose tensors may be filled anew for each replay."""
        step = _FlashStep(self._package, kv, tensors.slot_mapping, rotation)
        num_seqs, width = tensors.block_table.shape
        part = _Part(
            tokens=None,
            table=tensors.block_table,
            context_lens=tensors.context_lens,
            # Made on the device: a copy from the host would be part of the graph.
            cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=kv.pool.device),
            cu_seqlens_k=None,
            longest_q=1,
            longest_k=width * kv.spec.block_size,
        )
        (step.add_chunks if self._package.with_kvcache is None else step.add_decodes)(part)
        return step


class _Part:
    """Some sequences of a step, as the package is told of them."""

    def __init__(
        self,
        *,
        tokens: Tensor | None,
        table: Tensor,
        context_lens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        longest_q: int,
        longest_k: int,
    ) -> None:
        self.tokens = tokens  # int64: their rows in the step; None: all rows are theirs
        self.table = table  # int32 [seqs, width]
        self.context_lens = context_lens  # int32 [seqs]
        self.cu_seqlens_q = cu_seqlens_q  # int32 [seqs + 1]
        # Where they change from replay to replay they are summed up within it.
        self._cu_seqlens_k = cu_seqlens_k
        self.longest_q = longest_q
        self.longest_k = longest_k

    @property
    def cu_seqlens_k(self) -> Tensor:
        """int32 [seqs + 1]."""
        if self._cu_seqlens_k is not None:
            return self._cu_seqlens_k
        sums = self.context_lens.cumsum(0, dtype=torch.int32)
        return torch.cat((sums.new_zeros(1), sums))


class _FlashStep:
    def __init__(
        self, package: FlashPackage, kv: KvCache, slots: Tensor, rotation: Rotation
    ) -> None:
        self._package, self._kv, self._slots, self._rotation = package, kv, slots, rotation
        self._decodes: _Part | None = None
        self._chunks: _Part | None = None

    def add_decodes(self, part: _Part) -> None:
        self._decodes = part

    def add_chunks(self, part: _Part) -> None:
        self._chunks = part

    def __call__(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None = None) -> Tensor:
        turn_and_write(self._kv, layer, qkv, self._slots, self._rotation, qk_norm)
        spec = self._kv.spec
        # [num_blocks, block_size, K, D]: strided views, as a layer lies in the block-major pool.
        keys, values = self._kv.pool[:, layer, 0], self._kv.pool[:, layer, 1]
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        query = heads[:, : heads.shape[1] - 2 * spec.num_kv_heads]  # [tokens, H, D], strided
        out: Tensor | None = None
        for part, attend in ((self._decodes, self._decode), (self._chunks, self._prefill)):
            if part is None:
                continue
            if part.tokens is None:
                return attend(part, query, keys, values).reshape(len(qkv), -1)
            mixed = attend(part, query[part.tokens], keys, values)
            if out is None:
                out = torch.empty(query.shape, dtype=qkv.dtype, device=qkv.device)
            out[part.tokens] = mixed
        if out is None:
            return qkv.new_empty((len(qkv), query.shape[1] * spec.head_dim))
        return out.view(len(qkv), -1)

    def _decode(self, part: _Part, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [seqs, H, D], a token of each."""
        assert self._package.with_kvcache is not None
        mixed: Tensor = self._package.with_kvcache(
            query[:, None],
            keys,
            values,
            cache_seqlens=part.context_lens,
            block_table=part.table,
            softmax_scale=self._kv.spec.head_dim**-0.5,
            causal=True,
        )
        return mixed[:, 0]

    def _prefill(self, part: _Part, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [tokens of all chunks, H, D]."""
        if self._package.takes_lengths:
            contexts = {"seqused_k": part.context_lens}
        else:
            contexts = {"cu_seqlens_k": part.cu_seqlens_k}
        mixed: Tensor = self._package.varlen(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=part.longest_q,
            max_seqlen_k=part.longest_k,
            softmax_scale=self._kv.spec.head_dim**-0.5,
            causal=True,
            block_table=part.table,
            **contexts,
            **self._package.extra,
        )
        return mixed


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.cumsum([0, *lengths], dtype=np.int32), device)
