"""Attention by the native kernels, which read the pool where it lies."""

from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionRow, QkNorm, Rotation, StepAttention
from engine.kv_cache import KvCache
from engine.native.library import Library, Pool, Step


class NativeAttention:
    """See src/attention.cpp. A token's result does not depend on its batch, nor on its chunk."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self._library = library

    def begin(self, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation) -> StepAttention:
        return _NativeStep(self._library, kv, rows, rotation)


class _NativeStep:
    def __init__(
        self, library: Library, kv: KvCache, rows: Sequence[AttentionRow], rotation: Rotation
    ) -> None:
        spec = kv.spec
        self._library = library
        self._head_dim, self._kv_heads = spec.head_dim, spec.num_kv_heads
        self._rotation = rotation
        # Other ranks' parts of a block are to the kernels layers that nobody asks for.
        self._pool = Pool(
            kv.pool.data_ptr(),
            *(spec.layers_apart, spec.block_size, spec.num_kv_heads),
            *(spec.head_dim, spec.head_width, spec.fp8),
        )
        used = [row.block_ids[: -(-row.context_len // spec.block_size)] for row in rows]
        blocks = np.zeros((len(rows), max(map(len, used), default=0)), dtype=np.int32)
        for line, ids, row in zip(blocks, used, rows, strict=True):
            if len(ids) * spec.block_size < row.context_len:
                raise ValueError(f"{len(ids)} blocks for {row.context_len} tokens")
            line[: len(ids)] = ids
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < spec.num_blocks:
            raise ValueError(f"a block id outside [0, {spec.num_blocks})")
        firsts = np.cumsum([0, *(row.num_tokens for row in rows)], dtype=np.int32)
        starts = np.array([row.start for row in rows], dtype=np.int32)
        # The structure holds addresses only; `_arrays` keeps what they point to.
        self._arrays = (kv, firsts, starts, blocks)
        self._step = Step(
            *(len(rows), blocks.shape[1]), _pointer(firsts), _pointer(starts), _pointer(blocks)
        )

    def __call__(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None = None) -> Tensor:
        tokens, width = qkv.shape
        num_heads = width // self._head_dim - 2 * self._kv_heads
        threads = torch.get_num_threads()
        norms = (None, None) if qk_norm is None else (qk_norm.query, qk_norm.key)
        self._library.rope_write(
            byref(self._step),
            byref(self._pool),
            layer,
            qkv.data_ptr(),
            num_heads,
            self._rotation.cos.data_ptr(),
            self._rotation.sin.data_ptr(),
            *(None if weight is None else weight.data_ptr() for weight in norms),
            0.0 if qk_norm is None else qk_norm.eps,
            threads,
        )
        out = torch.empty((tokens, num_heads * self._head_dim), dtype=qkv.dtype)
        self._library.attend(
            byref(self._step),
            byref(self._pool),
            layer,
            qkv.data_ptr(),
            width,
            out.data_ptr(),
            out.shape[1],
            num_heads,
            self._head_dim**-0.5,
            threads,
        )
        return out


def _pointer(array: NDArray[np.int32]) -> "POINTER(c_int32)":  # type: ignore[valid-type]
    return array.ctypes.data_as(POINTER(c_int32))
