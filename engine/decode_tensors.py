"""The inputs of a step that only decodes, as tensors: what a captured graph reads at a replay."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionRow
from engine.kv_cache import KvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTensors:
    """B sequences with one token each, row i of the step the i-th's. All on the pool's device.

    A row with a context of 0 is nobody's: it fills a batch up to the size that was captured, its
    slot is -1, and what is computed for it has no meaning.
    """

    slot_mapping: Tensor  # int64 [B]: block * block_size + place of the token; -1: none
    block_table: Tensor  # int32 [B, width]
    context_lens: Tensor  # int32 [B], this step's token included


def check_blocks(rows: Sequence[AttentionRow], spec: KvSpec) -> None:
    """Raises ValueError where a row's blocks are too few, or not the pool's."""
    for row in rows:
        if len(row.block_ids) * spec.block_size < row.context_len:
            raise ValueError(f"{len(row.block_ids)} blocks for {row.context_len} tokens")
        used = row.block_ids[: -(-row.context_len // spec.block_size)]
        if not 0 <= min(used) <= max(used) < spec.num_blocks:
            raise ValueError(f"a block id outside [0, {spec.num_blocks})")


def slot_mapping(rows: Sequence[AttentionRow], block_size: int) -> NDArray[np.int64]:
    """The slot of each token of the step, int64 [tokens]."""
    slots = [
        np.asarray(row.block_ids, dtype=np.int64)[places // block_size] * block_size
        + places % block_size
        for row in rows
        for places in (np.arange(row.start, row.context_len, dtype=np.int64),)
    ]
    return np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64)


def block_table(
    rows: Sequence[AttentionRow], block_size: int, width: int | None = None
) -> NDArray[np.int32]:
    """Each row's blocks as far as its context goes, then zeros: int32 [rows, width]."""
    used = [row.block_ids[: -(-row.context_len // block_size)] for row in rows]
    table = np.zeros((len(rows), width or max(map(len, used), default=0)), dtype=np.int32)
    for line, ids in zip(table, used, strict=True):
        line[: len(ids)] = ids
    return table


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of it there; to a GPU from pinned memory, so that nobody waits for it."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
