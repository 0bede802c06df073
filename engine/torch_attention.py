"""Attention in plain torch: runs wherever torch does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionRow, QkNorm, Rotation, StepAttention
from engine.decode_tensors import to_device
from engine.fp8_kv import pack, unpack
from engine.kv_cache import KvCache


class TorchAttention:
    """scaled_dot_product_attention over KV gathered by token.

    Single tokens (decoding) go in padded groups of similar context length, one call per group and
    layer; prompt chunks go one by one.
    """

    name = "torch"

    def begin(self, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation) -> StepAttention:
        return _TorchStep(kv, rows, rotation)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one token each. B of them, contexts up to L tokens."""

    tokens: Tensor  # [B] row of each in the step
    slots: Tensor  # [B * L] pool rows of layer 0's keys; a short context repeats its last
    mask: Tensor | None  # [B, 1, 1, L] True where the context has a token; None: all do


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of one prompt: rows [first, first + num_tokens) of the step."""

    first: int
    num_tokens: int
    slots: Tensor | None  # [context] pool rows of layer 0's keys; None: nothing came before
    mask: Tensor | None  # [num_tokens, context]


class _TorchStep:
    def __init__(self, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation) -> None:
        spec, device = kv.spec, kv.pool.device
        self._rotation = rotation
        self._heads, self._head_dim = spec.num_kv_heads, spec.head_dim
        self._fp8, self._head_width = spec.fp8, spec.head_width
        # One row per token, layer and half (keys, values): a strided slice of this is what a layer
        # sees of the pool.
        self._pool = kv.token_rows
        self._value_offset = spec.block_size
        self._layer_offset = 2 * spec.block_size
        slots = [_slots(row, kv) for row in rows]
        written = np.concatenate([s[row.start :] for s, row in zip(slots, rows, strict=True)])
        self._written = to_device(np.concatenate((written, written + spec.block_size)), device)
        self._chunks: list[_Chunk] = []
        singles: dict[int, list[tuple[int, np.ndarray]]] = {}
        first = 0
        for row, row_slots in zip(rows, slots, strict=True):
            if row.num_tokens == 1:
                # Contexts of one group differ by less than a factor of two, so that padding never
                # costs more than the work itself.
                singles.setdefault(row.context_len.bit_length(), []).append((first, row_slots))
            else:
                self._chunks.append(_chunk(first, row, row_slots, device))
            first += row.num_tokens
        self._decodes = [_decodes(group, device) for group in singles.values()]

    def __call__(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None = None) -> Tensor:
        heads = qkv.view(len(qkv), -1, self._head_dim)  # [tokens, H + 2 K, D]
        num_heads = heads.shape[1] - 2 * self._heads
        query, key, value = heads.split((num_heads, self._heads, self._heads), dim=1)
        if qk_norm is not None:
            query = F.rms_norm(query, qk_norm.query.shape, qk_norm.query, qk_norm.eps)
            key = F.rms_norm(key, qk_norm.key.shape, qk_norm.key, qk_norm.eps)
        mixed = self._attend(layer, self._turned(query), self._turned(key), value)
        return mixed.view(len(qkv), -1)

    def _turned(self, x: Tensor) -> Tensor:
        """RoPE of [tokens, heads, D], in float32.

        Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
        """
        cos, sin = self._rotation.cos[:, None], self._rotation.sin[:, None]
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes to the pool and attends. query [tokens, H, D], key and value [tokens, K, D]."""
        offset = layer * self._layer_offset
        new = torch.cat((key, value))
        stored = pack(new) if self._fp8 else new
        width = self._heads * self._head_width
        self._pool.index_copy_(0, self._written + offset, stored.reshape(-1, width))
        if self._fp8:  # what others will read is what this step reads
            key, value = unpack(stored, query.dtype).chunk(2)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._decodes:
            out[group.tokens] = self._attend_decodes(group, offset, query)
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.first + chunk.num_tokens)
            if chunk.slots is None:
                keys, values = key[part], value[part]
            else:
                keys, values = self._gather(chunk.slots, offset, query.dtype)
            mixed = F.scaled_dot_product_attention(
                query[part].transpose(0, 1)[None],  # [1, H, tokens, D]
                keys.transpose(0, 1)[None],  # [1, K, context, D]
                values.transpose(0, 1)[None],
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                enable_gqa=True,
            )
            out[part] = mixed[0].transpose(0, 1)
        return out

    def _attend_decodes(self, group: _Decodes, offset: int, query: Tensor) -> Tensor:
        size = len(group.tokens)
        keys, values = self._gather(group.slots, offset, query.dtype)
        # The heads that share a KV head stand as its query positions: [B, K, H / K, D].
        grouped = query[group.tokens].view(size, self._heads, -1, self._head_dim)
        mixed = F.scaled_dot_product_attention(
            grouped,
            keys.view(size, -1, self._heads, self._head_dim).transpose(1, 2),  # [B, K, L, D]
            values.view(size, -1, self._heads, self._head_dim).transpose(1, 2),
            attn_mask=group.mask,
        )
        return mixed.reshape(size, -1, self._head_dim)

    def _gather(self, slots: Tensor, offset: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of these slots, each [len(slots), K, D] of `dtype`, the step's."""
        keys = self._pool.index_select(0, slots + offset)
        values = self._pool.index_select(0, slots + (offset + self._value_offset))
        shape = (-1, self._heads, self._head_width)
        keys, values = keys.view(shape), values.view(shape)
        return (unpack(keys, dtype), unpack(values, dtype)) if self._fp8 else (keys, values)


def _slots(row: AttentionRow, kv: KvCache) -> np.ndarray:
    """Pool rows of layer 0's keys for the row's whole context, int64 [context_len]."""
    size = kv.spec.block_size
    used = row.block_ids[: -(-row.context_len // size)]
    starts = np.array(used, dtype=np.int64) * (kv.spec.layers_apart * 2 * size)
    return (starts[:, None] + np.arange(size, dtype=np.int64)).reshape(-1)[: row.context_len]


def _decodes(group: list[tuple[int, np.ndarray]], device: torch.device) -> _Decodes:
    lengths = np.array([len(slots) for _, slots in group])
    longest = int(lengths.max())
    padded = np.stack([np.pad(slots, (0, longest - len(slots)), mode="edge") for _, slots in group])
    mask = None
    if int(lengths.min()) < longest:
        mask = to_device(np.arange(longest) < lengths[:, None], device)[:, None, None]
    tokens = torch.tensor([token for token, _ in group], device=device)
    return _Decodes(tokens, to_device(padded.reshape(-1), device), mask)


def _chunk(first: int, row: AttentionRow, slots: np.ndarray, device: torch.device) -> _Chunk:
    if row.start == 0:
        return _Chunk(first, row.num_tokens, None, None)
    shape = (row.num_tokens, row.context_len)
    mask = torch.ones(shape, dtype=torch.bool, device=device).tril(row.start)
    return _Chunk(first, row.num_tokens, to_device(slots, device), mask)
