"""The KV pool of one worker: one block-major tensor over its own memory, another's or a GPU's.

`[num_blocks, ranks, num_layers, 2, block_size, num_kv_heads, head_dim]`, contiguous: a block's KV
over all layers is one range of bytes, and a layer's view is a strided slice. In FP8 a head has its
scale behind its dims (`engine.fp8_kv`). Where a worker has several ranks, a block is their parts
one behind the other, and each rank works on its own.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from core.errors import ConfigError
from engine.fp8_kv import SCALE_BYTES
from engine.fp8_numbers import FP8

_CPU = torch.device("cpu")
LAYOUT = "blocks,layers,kv,tokens,kv_heads,head_dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """The pool's shape."""

    num_blocks: int
    num_layers: int
    block_size: int
    # Of one rank. All have as many.
    num_kv_heads: int
    head_dim: int
    # Of the numbers: bfloat16, float32, or FP8.
    dtype: torch.dtype
    ranks: int = 1

    @property
    def fp8(self) -> bool:
        """Whether heads are stored as `engine.fp8_kv` packs them."""
        return self.dtype == FP8

    @property
    def stored(self) -> torch.dtype:
        """Of the pool's elements: the numbers' own, or bytes."""
        return torch.uint8 if self.fp8 else self.dtype

    @property
    def head_width(self) -> int:
        """Of the pool's elements, for one head of a token's keys or values."""
        return self.head_dim + SCALE_BYTES if self.fp8 else self.head_dim

    @property
    def head_bytes(self) -> int:
        return self.head_width * self.stored.itemsize

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Of one rank's part."""
        return (
            *(self.num_blocks, self.num_layers, 2),
            *(self.block_size, self.num_kv_heads, self.head_width),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and ranks."""
        return self.ranks * self.rank_bytes

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's part of a block."""
        return self.block_size * 2 * self.num_layers * self.num_kv_heads * self.head_bytes

    @property
    def layers_apart(self) -> int:
        """From a rank's part of one block to that of the next, in layers."""
        return self.ranks * self.num_layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes

    def num_blocks_for(self, kv_bytes: int) -> int:
        """Blocks of this shape that fit `kv_bytes`. Raises ConfigError where not one does."""
        if kv_bytes < self.block_bytes:
            raise ConfigError(
                f"a KV pool of {kv_bytes} bytes holds no block of {self.block_bytes} bytes"
            )
        return kv_bytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory that other processes can map: `buffer` is what `file` has from `offset` on."""

    buffer: memoryview
    file: int
    offset: int

    @classmethod
    def mapped(cls, file: int, offset: int, num_bytes: int) -> Self:
        """What somebody else has made. `offset` is a multiple of the page size."""
        found = mmap.mmap(file, num_bytes, offset=offset)
        return cls(memoryview(found), file, offset)

    @classmethod
    def anonymous(cls, num_bytes: int) -> Self:
        """New memory under no name, gone with the last process that has it."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("tandem-kv")
        else:
            with tempfile.TemporaryFile() as made:
                file = os.dup(made.fileno())
        os.ftruncate(file, num_bytes)
        return cls.mapped(file, 0, num_bytes)


class KvCache:
    """The pool as a tensor (`pool`) and as bytes for transfers (`bytes`), over one memory.

    `pool` is the part of `rank`; `bytes` are those of all ranks.

    On a GPU they are two: there `device_bytes` are the pool's, uint8 [num_blocks, block_bytes], and
    `bytes` are where transports that know host memory alone put blocks and find them, under the
    same ids (`kv_transfer.device_blocks`).

    `buffer` is writable memory of at least `spec.kv_bytes` bytes, such as a shared segment; its
    owner keeps it open longer than this object. Without one the pool takes memory of its own. No
    page of it is touched here, so start-up time and resident memory do not depend on its size.
    """

    def __init__(
        self,
        spec: KvSpec,
        buffer: memoryview | None = None,
        device: torch.device = _CPU,
        rank: int = 0,
    ) -> None:
        if buffer is None:
            # Pages of an anonymous mapping read as zero and exist once they are written.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            buffer = memoryview(mmap.mmap(-1, spec.kv_bytes, flags=flags))
        if buffer.readonly or buffer.nbytes < spec.kv_bytes:
            raise ValueError(
                f"the KV pool needs {spec.kv_bytes} writable bytes, not {buffer.nbytes}"
                f"{' read-only' if buffer.readonly else ''}"
            )
        memory = np.frombuffer(buffer, dtype=np.uint8, count=spec.kv_bytes)
        self.spec = spec
        # [num_blocks, block_bytes]
        self.bytes: NDArray[np.uint8] = memory.reshape(spec.num_blocks, spec.block_bytes)
        # `pool`: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_width]. `token_rows`:
        # the same memory as a row of num_kv_heads * head_width for each token, half and layer; a
        # block's begin `spec.layers_apart` layers behind those of the block before.
        self.device_bytes: torch.Tensor | None = None
        self._written: torch.cuda.Event | None = None
        if device.type == "cpu":
            whole = torch.from_numpy(memory).view(spec.stored)
            self.pool = whole.view(spec.num_blocks, spec.ranks, *spec.shape[1:])[:, rank]
            first = rank * (spec.rank_bytes // spec.stored.itemsize)
            self.token_rows = whole[first:].view(-1, spec.num_kv_heads * spec.head_width)
        else:
            if spec.ranks > 1:
                raise ValueError("a pool on a GPU is one rank's")
            self.pool = torch.empty(spec.shape, dtype=spec.stored, device=device)
            self.token_rows = self.pool.view(-1, spec.num_kv_heads * spec.head_width)
            self.device_bytes = self.pool.view(spec.num_blocks, -1).view(torch.uint8)

    def copy_block(self, source: int, target: int) -> None:
        """Makes block `target` equal to block `source`, in all layers. On the compute thread."""
        self.pool[target].copy_(self.pool[source])

    def mark_written(self) -> None:
        """What the caller's stream was given so far is what `await_written` waits for."""
        if self.device_bytes is not None:
            written = torch.cuda.Event()
            written.record()
            self._written = written

    def await_written(self) -> None:
        """Waits, on any thread, until what was marked is in the pool. At once on a CPU."""
        if self._written is not None:
            self._written.synchronize()
