"""Weights as a GGUF file quantises them: groups of 32 numbers along each row.

Formats: block_q4_0, block_q4_1 and block_q8_0 of ggml,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np
from numpy.typing import NDArray


class GroupedKind(Enum):
    """A format, by GGUF's name for it."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q8_0 = "Q8_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A matrix [out, in] in the file's own bytes."""

    kind: GroupedKind
    shape: tuple[int, int]
    rows: NDArray[np.uint8]  # [out, in / 32 * bytes of a group]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The parts, of one kind and width, one below the other."""
        return cls(
            kind=parts[0].kind,
            shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
            rows=np.concatenate([part.rows for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedModel:
    """The matrices of a model that its file has in groups, as the engine merges them."""

    layers: tuple[Mapping[str, GroupedWeight], ...]  # by the names in LayerWeights
    head: GroupedWeight | None


NO_GROUPS: Mapping[str, GroupedWeight] = {}
