"""Filling a model's weights from GGUF or safetensors.

The model's merged matrices are allocated once; every tensor of the source is copied into its slice
of them, so that loading needs little more memory than the model. Names are Hugging Face's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from core.errors import ConfigError
from engine.llama import LayerWeights, LlamaWeights
from engine.model_config import ModelConfig

_CPU = torch.device("cpu")


class ModelSource(Protocol):
    """Where a model lies: `engine.gguf_weights.GgufSource` or `engine.hf_folder.HfFolder`."""

    @property
    def path(self) -> Path: ...

    @property
    def num_tensors(self) -> int: ...

    def config(self) -> ModelConfig: ...

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor, of any float dtype, each read when its turn comes."""
        ...


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: bool,
    device: torch.device = _CPU,
) -> LlamaWeights:
    """Reads the weights of `source` as `dtype` into memory of `device`.

    With `progress` a bar is drawn on stderr where that is a terminal. Raises ConfigError that names
    the tensor which is missing, unknown or of the wrong shape, or the file that cannot be read.
    """
    weights, slots = _allocate(config, dtype, device)
    bar = tqdm(
        source.tensors(config),
        total=source.num_tensors,
        desc="loading weights",
        unit="tensor",
        leave=False,
        disable=None if progress else True,  # None: unless stderr is a terminal
    )
    for name, tensor in bar:
        _fill(slots, name, tensor, config, source.path)
    if slots:
        raise ConfigError(f"{source.path}: tensor {min(slots)} is missing ({len(slots)} in all)")
    return weights


def _allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[LlamaWeights, dict[str, Tensor]]:
    """Unfilled weights, and for each tensor of a checkpoint the slice that it fills."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    slots: dict[str, Tensor] = {}
    layers = []
    for index in range(config.num_layers):
        layer = LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(q_rows + 2 * kv_rows, hidden),
            output=empty(hidden, q_rows),
            post_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
            qkv_bias=empty(q_rows + 2 * kv_rows) if config.qkv_bias else None,
            output_bias=empty(hidden) if config.output_bias else None,
            gate_up_bias=empty(2 * inner) if config.mlp_bias else None,
            down_bias=empty(hidden) if config.mlp_bias else None,
            qk_norm=(empty(config.head_dim), empty(config.head_dim)) if config.qk_norm else None,
        )
        slots |= {
            f"model.layers.{index}.{name}": slot for name, slot in _layer_slots(layer, config)
        }
        layers.append(layer)
    embedding = empty(config.vocab_size, hidden)
    head = embedding if config.tie_embeddings else empty(config.vocab_size, hidden)
    final_norm = empty(hidden)
    slots |= {"model.embed_tokens.weight": embedding, "model.norm.weight": final_norm}
    if not config.tie_embeddings:
        slots["lm_head.weight"] = head
    weights = LlamaWeights(
        embedding=embedding, layers=tuple(layers), final_norm=final_norm, head=head
    )
    return weights, slots


def _layer_slots(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The names of one layer's tensors in a checkpoint, and where each goes."""
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", layer.qk_norm[0]
        yield "self_attn.k_norm.weight", layer.qk_norm[1]
    for kind, qkv, output, gate_up, down in (
        ("weight", layer.qkv, layer.output, layer.gate_up, layer.down),
        ("bias", layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias),
    ):
        if qkv is not None:
            for name, part in zip("qkv", qkv.split((q_rows, kv_rows, kv_rows)), strict=True):
                yield f"self_attn.{name}_proj.{kind}", part
        if output is not None:
            yield f"self_attn.o_proj.{kind}", output
        if gate_up is not None:
            gate, up = gate_up.split(config.intermediate_size)
            yield f"mlp.gate_proj.{kind}", gate
            yield f"mlp.up_proj.{kind}", up
        if down is not None:
            yield f"mlp.down_proj.{kind}", down


def _fill(
    slots: dict[str, Tensor], name: str, tensor: Tensor, config: ModelConfig, source: Path
) -> None:
    # Old checkpoints store RoPE's frequencies, which follow from the config, and some a tied head.
    if name.endswith(".rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_embeddings
    ):
        return
    slot = slots.pop(name, None)
    shape = list(tensor.shape)
    if slot is None:
        raise ConfigError(f"{source}: tensor {name} {shape} is not part of {config.architecture}")
    if slot.shape != tensor.shape:
        raise ConfigError(f"{source}: tensor {name} is {shape} and should be {list(slot.shape)}")
    slot.copy_(tensor)
