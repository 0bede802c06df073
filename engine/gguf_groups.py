"""The matrices of a GGUF file that are quantised in groups, merged as the engine merges them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.gguf_file import GgufFile
from engine.grouped import GroupedKind, GroupedModel, GroupedWeight

_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
_KINDS = {kind.value: kind for kind in GroupedKind}

# Puts the rows of a layer's tensor, given its name such as attn_q, into the engine's order.
RowOrder = Callable[[str, NDArray[np.uint8]], NDArray[np.uint8]]


def grouped_model(file: GgufFile, num_layers: int, row_order: RowOrder) -> GroupedModel:
    """What can be had in groups. A merged matrix whose parts differ in kind cannot."""

    def matrix(names: list[str]) -> GroupedWeight | None:
        parts = []
        for name in names:
            tensor = file.tensors.get(f"{name}.weight")
            kind = _KINDS.get(getattr(tensor and tensor.tensor_type, "name", ""))
            if tensor is None or kind is None:
                return None
            rows = np.ascontiguousarray(row_order(name.rpartition(".")[2], tensor.data))
            columns, outputs = (int(size) for size in tensor.shape)
            parts.append(GroupedWeight(kind=kind, shape=(outputs, columns), rows=rows))
        return GroupedWeight.joined(parts) if len({part.kind for part in parts}) == 1 else None

    layers = []
    for index in range(num_layers):
        found = {
            field: matrix([f"blk.{index}.{part}" for part in parts])
            for field, parts in _PARTS.items()
        }
        layers.append({field: weight for field, weight in found.items() if weight is not None})
    head = "output" if "output.weight" in file.tensors else "token_embd"
    return GroupedModel(layers=tuple(layers), head=matrix([head]))
