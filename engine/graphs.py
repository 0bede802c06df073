"""Decode steps as captured graphs: one for each bucket of batch sizes, over buffers that stay.

Launching a step's few hundred kernels one by one takes a GPU longer than computing them; a graph is
launched at once. It reads the same addresses each time, so a step's inputs are copied into static
buffers before it, and a batch is filled up to its bucket with rows that are nobody's. Steps with
prompts, with more sequences than the largest bucket or longer contexts than the tables, and all
steps where graphs cannot be had, are computed eagerly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionBackend, AttentionRow, Rotation, StepAttention
from engine.decode_tensors import DecodeTensors, block_table, slot_mapping
from engine.kv_cache import KvCache


@runtime_checkable
class ReplayableAttention(AttentionBackend, Protocol):
    """A backend whose decode can be captured: all that changes is in tensors."""

    def begin_decode(
        self, kv: KvCache, tensors: DecodeTensors, rotation: Rotation
    ) -> StepAttention: ...


class Capture(Protocol):
    """Makes a graph of what `work` launches; the result launches it again."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]: ...


class CudaCapture:
    """By CUDA's own graphs, all out of one pool of memory, on the caller's stream."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # what is compiled or allocated once must not be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._pool = self._pool or graph.pool()
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Static inputs of B rows, on the pool's device."""

    token_ids: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]
    tensors: DecodeTensors


# Final hidden states [B, hidden] of these inputs.
DecodeForward = Callable[[DecodeInputs], Tensor]


def buckets(max_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: a batch is filled up by less than a half, from eight on by an eighth
    or eight rows."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_seqs]
    sizes += range(16, max_seqs, 8)
    return (*sizes, max_seqs)


class DecodeGraphs:
    """Captured decode steps. `capture_all` is called once, while nothing else uses the device."""

    def __init__(
        self,
        forward: DecodeForward,
        kv: KvCache,
        *,
        max_seqs: int,
        window: int,
        capture: Capture,
    ) -> None:
        device, size = kv.pool.device, kv.spec.block_size
        self._forward, self._capture, self._block_size = forward, capture, size
        self._width = -(-window // size)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Every bucket's are the first rows of these.
        self._token_ids = zeros(max_seqs, dtype=torch.int64)
        self._positions = zeros(max_seqs, dtype=torch.int64)
        self._slots = torch.full((max_seqs,), -1, dtype=torch.int64, device=device)
        self._table = zeros(max_seqs, self._width, dtype=torch.int32)
        self._context_lens = zeros(max_seqs, dtype=torch.int32)
        self._sizes = buckets(max_seqs)
        self._graphs: dict[int, tuple[Callable[[], None], list[Tensor]]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that were captured."""
        return tuple(sorted(self._graphs))

    def capture_all(self) -> None:
        """Captures every bucket, the largest first, whose memory the others use again.

        Where the device refuses, steps of that bucket stay eager; one log line says so.
        """
        for size in reversed(self._sizes):
            inputs = self._inputs(size)
            hidden: list[Tensor] = []

            def work(inputs: DecodeInputs = inputs, hidden: list[Tensor] = hidden) -> None:
                hidden[:] = [self._forward(inputs)]

            try:
                self._graphs[size] = (self._capture(work), hidden)
            except RuntimeError as error:
                structlog.get_logger().warning(
                    "decode_graph_not_captured", batch=size, why=str(error).splitlines()[0]
                )

    def bucket(self, rows: Sequence[AttentionRow]) -> int | None:
        """The graph that computes these rows; None where none does."""
        if not rows or any(row.num_tokens != 1 for row in rows):
            return None
        if max(row.context_len for row in rows) > self._width * self._block_size:
            return None
        return min((size for size in self._graphs if size >= len(rows)), default=None)

    def run(self, rows: Sequence[AttentionRow], token_ids: Sequence[int], size: int) -> Tensor:
        """Final hidden states of these rows, [rows, hidden], good until the next call.

        `size` is what `bucket` gave for them.
        """
        count = len(rows)
        table = block_table(rows, self._block_size)
        self._fill(self._token_ids, np.asarray(token_ids, dtype=np.int64), size)
        self._fill(self._positions, np.array([row.start for row in rows], dtype=np.int64), size)
        self._fill(self._slots, slot_mapping(rows, self._block_size), size, rest=-1)
        lengths = np.array([row.context_len for row in rows], dtype=np.int32)
        self._fill(self._context_lens, lengths, size)
        _copy(self._table[:count, : table.shape[1]], table)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[0][:count]

    def _inputs(self, size: int) -> DecodeInputs:
        return DecodeInputs(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            tensors=DecodeTensors(
                slot_mapping=self._slots[:size],
                block_table=self._table[:size],
                context_lens=self._context_lens[:size],
            ),
        )

    def _fill(self, buffer: Tensor, values: NDArray[np.generic], size: int, rest: int = 0) -> None:
        padded = np.full(size, rest, dtype=values.dtype)
        padded[: len(values)] = values
        _copy(buffer[:size], padded)


def _copy(target: Tensor, values: NDArray[np.generic]) -> None:
    host = torch.from_numpy(values)
    if target.device.type != "cpu":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
