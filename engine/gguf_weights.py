"""The tensors of a GGUF file, dequantised, under Hugging Face's names and in its row order."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import ConfigError
from engine.gguf_file import ROPE_DIVISORS, open_gguf
from engine.gguf_groups import grouped_model
from engine.grouped import GroupedModel
from engine.model_config import ModelConfig

Number = TypeVar("Number", np.float32, np.uint8)

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """Opens a GGUF file. Raises ConfigError where it is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_gguf(path)

    @property
    def num_tensors(self) -> int:
        return len(self._file.tensors)

    def config(self) -> ModelConfig:
        """The model's shape. Raises ConfigError where the engine cannot compute it."""
        return self._file.config()

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, "_Dequantised"]]:
        """Every tensor as float32; one that is not a decoder's keeps its GGUF name.

        Without the divisors of RoPE's frequencies, which are part of `config`.
        Raises ConfigError for a quantisation that the `gguf` library cannot undo.
        """
        from gguf.quants import dequantize

        heads = _permuted_heads(config)
        for name, tensor in self._file.tensors.items():
            if name == ROPE_DIVISORS:
                continue
            array = _read(dequantize, self.path, name, tensor)
            kind = name.split(".")[2] if name.startswith("blk.") and name.count(".") == 3 else ""
            if kind in heads:
                array = _unpermute(array, heads[kind], self.path, name)
            yield _hugging_face_name(name, kind), _Dequantised(array)

    def groups(self, config: ModelConfig) -> GroupedModel:
        """The matrices that are quantised in groups, in the file's own bytes."""
        heads = _permuted_heads(config)

        def in_order(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
            return _unpermute(rows, heads[kind], self.path, kind) if kind in heads else rows

        return grouped_model(self._file, config.num_layers, in_order)


class _Dequantised:
    """A tensor in memory: formats of groups are undone whole, and only then cut."""

    def __init__(self, array: NDArray[np.float32]) -> None:
        self._array = array
        self.shape: Sequence[int] = array.shape

    def read(self, part: tuple[slice, ...] | None = None) -> Tensor:
        return torch.from_numpy(self._array[part or ...])


def _permuted_heads(config: ModelConfig) -> dict[str, int]:
    """The tensors whose rows llama.cpp's converter has permuted, and their heads.

    It turns neighbouring dimensions in the models that it calls llama, and halves in the others.
    """
    if config.architecture != "LlamaForCausalLM":
        return {}
    return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}


def _read(dequantize: Any, path: Path, name: str, tensor: Any) -> NDArray[np.float32]:
    try:
        array: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    except Exception as error:
        kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
        raise ConfigError(f"{path}: tensor {name} ({kind}) is unreadable: {error}") from error
    # float32 tensors come as views of the read-only mapping, which torch does not take.
    return array if array.flags.writeable else array.copy()


def _unpermute(rows: NDArray[Number], num_heads: int, path: Path, name: str) -> NDArray[Number]:
    """Undoes the order in which llama.cpp's converter stores query and key rows.

    It interleaves the two halves of each head, so that RoPE turns neighbours; this engine turns
    dims i and i + D/2. `rows` is a matrix or a bias. Source: LlamaModel.permute in llama.cpp's
    convert_hf_to_gguf.py.
    """
    if rows.shape[0] % (2 * num_heads):
        raise ConfigError(
            f"{path}: tensor {name} is {list(rows.shape)}, not {num_heads} heads' rows"
        )
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _hugging_face_name(name: str, kind: str) -> str:
    if kind in _LAYER_NAMES:
        _, index, _, suffix = name.split(".")
        return f"model.layers.{index}.{_LAYER_NAMES[kind]}.{suffix}"
    return _MODEL_NAMES.get(name, name)
