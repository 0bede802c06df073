"""Attention by the Triton kernels, which read the pool where it lies."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from engine.attention import AttentionRow, QkNorm, Rotation, StepAttention
from engine.decode_tensors import (
    DecodeTensors,
    block_table,
    check_blocks,
    slot_mapping,
    to_device,
)
from engine.kv_cache import KvCache
from engine.triton import runtime
from engine.triton.paged_decode import paged_decode, reduce_parts
from engine.triton.paged_prefill import paged_prefill
from engine.triton.writing import turn_and_write

_TILE = 64  # tokens of a context at a time
_ROWS = 64  # queries of one program
_MAX_SPLITS = 64
# Programs that a decode should have at least, for each multiprocessor.
_PROGRAMS_PER_SM = 4


class TritonAttention:
    """Single tokens by parts of their contexts, chunks of prompts by tiles of their queries.

    `num_sms` is how many programs run at once: contexts are split as far as it takes to occupy
    them. None: those of the device.
    """

    name = "triton"

    def __init__(self, device: torch.device, num_sms: int | None = None) -> None:
        if num_sms is None:
            num_sms = 1
            if device.type == "cuda":
                num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = num_sms * _PROGRAMS_PER_SM

    def begin(self, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation) -> StepAttention:
        check_blocks(rows, kv.spec)
        device, size = kv.pool.device, kv.spec.block_size
        firsts = np.cumsum([0, *(row.num_tokens for row in rows)], dtype=np.int32)
        singles = [i for i, row in enumerate(rows) if row.num_tokens == 1]
        chunks = [i for i, row in enumerate(rows) if row.num_tokens > 1]
        slots = to_device(slot_mapping(rows, size), device)
        step = _TritonStep(kv, slots, rotation)
        if singles:
            decoding = [rows[i] for i in singles]
            lengths = np.array([row.context_len for row in decoding], dtype=np.int32)
            step.decodes = _Decodes(
                kv,
                tokens=to_device(firsts[singles], device),
                table=to_device(block_table(decoding, size), device),
                context_lens=to_device(lengths, device),
                num_splits=self.num_splits(kv, len(singles), int(lengths.max())),
            )
        if chunks:
            step.chunks = _Chunks(kv, [rows[i] for i in chunks], firsts[chunks])
        return step

    def begin_decode(
        self, kv: KvCache, tensors: DecodeTensors, rotation: Rotation
    ) -> StepAttention:
        """Of a step that only decodes, whose tensors may be filled anew for each replay."""
        step = _TritonStep(kv, tensors.slot_mapping, rotation)
        num_seqs, width = tensors.block_table.shape
        step.decodes = _Decodes(
            kv,
            tokens=torch.arange(num_seqs, dtype=torch.int32, device=kv.pool.device),
            table=tensors.block_table,
            context_lens=tensors.context_lens,
            num_splits=self.num_splits(kv, num_seqs, width * kv.spec.block_size),
        )
        return step

    def num_splits(self, kv: KvCache, num_seqs: int, longest: int) -> int:
        """Into how many parts each context goes; none is shorter than a tile."""
        wanted = -(-self._programs // (num_seqs * kv.spec.num_kv_heads))
        return max(1, min(wanted, -(-longest // _TILE), _MAX_SPLITS))


class _TritonStep:
    def __init__(self, kv: KvCache, slots: Tensor, rotation: Rotation) -> None:
        self._kv, self._slots, self._rotation = kv, slots, rotation
        self.decodes: _Decodes | None = None
        self.chunks: _Chunks | None = None

    def __call__(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None = None) -> Tensor:
        spec = self._kv.spec
        tokens, width = qkv.shape
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        heads = width // dim - 2 * kv_heads
        turn_and_write(self._kv, layer, qkv, self._slots, self._rotation, qk_norm)
        pool = self._kv.pool[:, layer]
        out = torch.empty((tokens, heads * dim), dtype=qkv.dtype, device=qkv.device)
        if self.decodes is not None:
            self.decodes.attend(pool, qkv, out, heads)
        if self.chunks is not None:
            self.chunks.attend(pool, qkv, out, heads)
        return out


class _Decodes:
    """The single tokens of a step."""

    def __init__(
        self, kv: KvCache, *, tokens: Tensor, table: Tensor, context_lens: Tensor, num_splits: int
    ) -> None:
        self._spec = kv.spec
        self._tokens, self._table, self._context_lens = tokens, table, context_lens
        self._num_splits = num_splits

    def attend(self, pool: Tensor, qkv: Tensor, out: Tensor, heads: int) -> None:
        spec, splits = self._spec, self._num_splits
        kv_heads, dim, num_seqs = spec.num_kv_heads, spec.head_dim, len(self._tokens)
        dims = max(runtime.MIN_TILE, runtime.tile(dim))
        part = torch.empty((num_seqs, heads, splits, dim), dtype=torch.float32, device=qkv.device)
        part_lse = torch.empty((num_seqs, heads, splits), dtype=torch.float32, device=qkv.device)
        paged_decode[(num_seqs, kv_heads, splits)](
            *(qkv, pool, self._tokens, self._table, self._context_lens, part, part_lse),
            _scale(dim),
            *(self._table.stride(0), pool.stride(0), pool.stride(1), splits),
            *(heads, kv_heads, dim, spec.block_size, spec.head_width, spec.fp8),
            GROUP=max(runtime.MIN_TILE, runtime.tile(heads // kv_heads)),
            TILE=_TILE,
            DIMS=dims,
            OPERAND=_operand(qkv.dtype),
        )
        reduce_parts[(num_seqs, heads)](
            *(part, part_lse, self._tokens, out, splits, heads, dim),
            SPLITS=runtime.tile(splits),
            DIMS=dims,
            BY_BITS=runtime.interpreted(),
        )


class _Chunks:
    """The parts of prompts in a step, cut into tiles of queries."""

    def __init__(self, kv: KvCache, rows: Sequence[AttentionRow], firsts: np.ndarray) -> None:
        self._spec = kv.spec
        device = kv.pool.device

        def on_device(values: list[int]) -> Tensor:
            return to_device(np.array(values, dtype=np.int32), device)

        tiles = [
            (chunk, first)
            for chunk, row in enumerate(rows)
            for first in range(0, row.num_tokens, _ROWS)
        ]
        self._tile_chunk = on_device([chunk for chunk, _ in tiles])
        self._tile_first = on_device([first for _, first in tiles])
        self._token = to_device(firsts, device)
        self._start = on_device([row.start for row in rows])
        self._len = on_device([row.num_tokens for row in rows])
        self._table = to_device(block_table(rows, kv.spec.block_size), device)

    def attend(self, pool: Tensor, qkv: Tensor, out: Tensor, heads: int) -> None:
        spec = self._spec
        paged_prefill[(len(self._tile_chunk), heads)](
            *(qkv, pool, out, self._tile_chunk, self._tile_first),
            *(self._token, self._start, self._len, self._table),
            _scale(spec.head_dim),
            *(self._table.stride(0), pool.stride(0), pool.stride(1)),
            *(heads, spec.num_kv_heads, spec.head_dim, spec.block_size),
            *(spec.head_width, spec.fp8),
            ROWS=_ROWS,
            TILE=_TILE,
            DIMS=max(runtime.MIN_TILE, runtime.tile(spec.head_dim)),
            OPERAND=_operand(qkv.dtype),
            BY_BITS=runtime.interpreted(),
        )


def _scale(head_dim: int) -> float:
    """Of the scores, so that powers of two are those of e."""
    return float(head_dim**-0.5 * math.log2(math.e))


def _operand(dtype: torch.dtype) -> "tl.dtype":
    """What tensor cores multiply; the interpreter multiplies no bfloat16."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not runtime.interpreted() else tl.float32
