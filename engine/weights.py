"""Filling a model's weights from GGUF or safetensors.

The model's merged matrices are allocated once; every tensor of the source is copied into its slice
of them, so that loading needs little more memory than the model. Names are Hugging Face's. A rank
of several reads of every tensor what is its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from core.errors import ConfigError
from engine.llama import LayerWeights, LlamaWeights
from engine.model_config import ModelConfig
from engine.parallel.shard import WHOLE, Shard

_CPU = torch.device("cpu")


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of any float dtype, that is read when it is asked for."""

    @property
    def shape(self) -> Sequence[int]: ...

    def read(self, part: tuple[slice, ...] | None = None) -> Tensor:
        """All of it, or of each dimension this part; a source that can reads no more than that."""
        ...


class ModelSource(Protocol):
    """Where a model lies: `engine.gguf_weights.GgufSource` or `engine.hf_folder.HfFolder`."""

    @property
    def path(self) -> Path: ...

    @property
    def num_tensors(self) -> int: ...

    def config(self) -> ModelConfig: ...

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
        """Hugging Face name and tensor, good until the next one is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor of a checkpoint goes."""

    # None: to another rank.
    target: Tensor | None
    # Of the whole tensor.
    shape: tuple[int, ...]
    # What of it goes there. None: all.
    part: tuple[slice, ...] | None = None


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: bool,
    device: torch.device = _CPU,
    shard: Shard = WHOLE,
) -> LlamaWeights:
    """Reads the weights of `source` as `dtype` into memory of `device`: those of `shard`.

    With `progress` a bar is drawn on stderr where that is a terminal. Raises ConfigError that names
    the tensor which is missing, unknown or of the wrong shape, or the file that cannot be read.
    """
    weights, slots = _allocate(config, dtype, device, shard)
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
    config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard
) -> tuple[LlamaWeights, dict[str, _Slot]]:
    """Unfilled weights, and for each tensor of a checkpoint the slice that it fills."""
    mine = shard.config(config)
    hidden, inner = config.hidden_size, mine.intermediate_size
    q_rows = mine.num_heads * config.head_dim
    kv_rows = mine.num_kv_heads * config.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def first_ranks_bias(wanted: bool) -> Tensor | None:
        """A bias of what the ranks sum: one of them adds it."""
        return empty(hidden) if wanted and shard.rank == 0 else None

    slots: dict[str, _Slot] = {}
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
            output_bias=first_ranks_bias(config.output_bias),
            gate_up_bias=empty(2 * inner) if config.mlp_bias else None,
            down_bias=first_ranks_bias(config.mlp_bias),
            qk_norm=(empty(config.head_dim), empty(config.head_dim)) if config.qk_norm else None,
        )
        slots |= {
            f"model.layers.{index}.{name}": slot
            for name, slot in _layer_slots(layer, config, shard)
        }
        layers.append(layer)
    embedding, embedding_slot = _words(empty(mine.vocab_size, hidden), config, shard)
    head, head_slot = embedding, embedding_slot
    if not config.tie_embeddings:
        head, head_slot = _words(empty(mine.vocab_size, hidden), config, shard)
        slots["lm_head.weight"] = head_slot
    final_norm = empty(hidden)
    slots |= {
        "model.embed_tokens.weight": embedding_slot,
        "model.norm.weight": _Slot(final_norm, (hidden,)),
    }
    weights = LlamaWeights(
        embedding=embedding, layers=tuple(layers), final_norm=final_norm, head=head
    )
    return weights, slots


def _words(table: Tensor, config: ModelConfig, shard: Shard) -> tuple[Tensor, _Slot]:
    """A table of a rank's words; what pads the vocabulary is zero."""
    part = shard.part_of(config.vocab_size)
    count = part.stop - part.start
    table[count:] = 0
    shape = (config.vocab_size, config.hidden_size)
    return table, _Slot(table[:count], shape, _of_dim(0, part, 2, shard))


def _layer_slots(
    layer: LayerWeights, config: ModelConfig, shard: Shard
) -> Iterator[tuple[str, _Slot]]:
    """The names of one layer's tensors in a checkpoint, and where each goes."""
    hidden, dim = config.hidden_size, config.head_dim
    kv_heads = shard.kv_heads_of(config.num_kv_heads)
    queries = _times(shard.part_of(config.num_heads), dim)
    keys = _times(kv_heads, dim)
    inner = shard.part_of(config.intermediate_size)
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim

    def outputs(target: Tensor, rows: int, part: slice) -> _Slot:
        """A weight cut by outputs, or its bias."""
        shape = (rows, hidden)[: target.ndim]
        return _Slot(target, shape, _of_dim(0, part, target.ndim, shard))

    yield "input_layernorm.weight", _Slot(layer.input_norm, (hidden,))
    yield "post_attention_layernorm.weight", _Slot(layer.post_norm, (hidden,))
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", _Slot(layer.qk_norm[0], (dim,))
        yield "self_attn.k_norm.weight", _Slot(layer.qk_norm[1], (dim,))
    for kind, qkv, gate_up in (
        ("weight", layer.qkv, layer.gate_up),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if qkv is not None:
            sizes = [part.stop - part.start for part in (queries, keys, keys)]
            query, key, value = qkv.split(sizes)
            yield f"self_attn.q_proj.{kind}", outputs(query, q_rows, queries)
            yield f"self_attn.k_proj.{kind}", outputs(key, kv_rows, keys)
            yield f"self_attn.v_proj.{kind}", outputs(value, kv_rows, keys)
        if gate_up is not None:
            gate, up = gate_up.split(inner.stop - inner.start)
            yield f"mlp.gate_proj.{kind}", outputs(gate, config.intermediate_size, inner)
            yield f"mlp.up_proj.{kind}", outputs(up, config.intermediate_size, inner)
    for name, weight, bias, biased, columns, part in (
        ("self_attn.o_proj", layer.output, layer.output_bias, config.output_bias, q_rows, queries),
        (
            *("mlp.down_proj", layer.down, layer.down_bias),
            *(config.mlp_bias, config.intermediate_size, inner),
        ),
    ):
        yield f"{name}.weight", _Slot(weight, (hidden, columns), _of_dim(1, part, 2, shard))
        if biased:
            yield f"{name}.bias", _Slot(bias, (hidden,))


def _times(heads: slice, dim: int) -> slice:
    """The rows of these heads."""
    return slice(heads.start * dim, heads.stop * dim)


def _of_dim(dim: int, part: slice, ndim: int, shard: Shard) -> tuple[slice, ...] | None:
    if shard.ranks == 1:
        return None
    return tuple(part if each == dim else slice(None) for each in range(ndim))


def _fill(
    slots: dict[str, _Slot], name: str, tensor: StoredTensor, config: ModelConfig, source: Path
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
    if list(slot.shape) != shape:
        raise ConfigError(f"{source}: tensor {name} is {shape} and should be {list(slot.shape)}")
    if slot.target is not None and slot.target.numel():
        slot.target.copy_(tensor.read(slot.part))
