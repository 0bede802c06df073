"""Digests of blocks that lie on a GPU, without a copy of them to the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.xxh3 import LEAST_BYTES, PRIME32_1, START, finish, seeded_secret
from engine.triton import runtime


class TritonDigests:
    """`xxh3_64` of each block with its seed. Raises TritonUnavailable where kernels cannot run."""

    def __init__(self, device: torch.device) -> None:
        runtime.require(device)
        from engine.triton.xxh3 import accumulate  # brings triton

        self._accumulate = accumulate
        self._device = device
        self._start = self._words([START])[0]

    @staticmethod
    def takes(block_bytes: int) -> bool:
        """Whether blocks of this size can be digested here."""
        return block_bytes >= LEAST_BYTES and block_bytes % 8 == 0

    def __call__(self, blocks: Tensor, seeds: Sequence[int]) -> tuple[int, ...]:
        """`blocks` is uint8 [n, block_bytes], contiguous."""
        num_bytes = blocks.shape[1]
        secrets = [seeded_secret(seed) for seed in seeds]
        out = torch.empty((len(blocks), 8), dtype=torch.int64, device=self._device)
        self._accumulate[(len(blocks),)](
            *(blocks.view(torch.int64), self._words(secrets), self._start, out, num_bytes // 8),
            PRIME=PRIME32_1,
        )
        sums = out.cpu().numpy().view(np.uint64).tolist()
        return tuple(
            finish(row, secret, num_bytes) for row, secret in zip(sums, secrets, strict=True)
        )

    def _words(self, rows: Sequence[Sequence[int]]) -> Tensor:
        array = np.array(rows, dtype=np.uint64).view(np.int64)
        return torch.from_numpy(array).to(self._device)
