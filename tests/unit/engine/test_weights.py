"""Loading: every source fills the same weights, and a wrong tensor is named."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.config import EngineConfig
from core.errors import ConfigError
from core.model_card import ModelCard
from engine.loader import effective_window, kv_spec, load_engine_model, open_source
from engine.weights import load_weights

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 64, 4, 2, 8, 20
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write_config(folder: Path, *, tied: bool = False) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(values))


def write_single(folder: Path, tensors: Tensors) -> Path:
    write_config(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: Tensors) -> Path:
    write_config(folder)
    names = list(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        file_name = f"model-{shard}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(folder: Path, tensors: Tensors) -> Path:
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, tensor in tensors.items():
        rows = tensor.numpy()
        for kind, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if f"{kind}.weight" in name:  # llama.cpp's order, as its converter writes it
                rows = rows.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2)
                rows = rows.reshape(tensor.shape)
        writer.add_tensor(GGUF_NAMES.get(name, name), np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WRITERS = [write_single, write_shards, write_gguf]
Writer = Callable[[Path, Tensors], Path]


def load(path: Path, dtype: torch.dtype = torch.float32):
    source = open_source(path)
    return load_weights(source, source.config(), dtype, progress=False)


@pytest.mark.parametrize("write", WRITERS)
def test_every_source_fills_the_merged_weights(
    tmp_path: Path, tensors: Tensors, write: Writer
) -> None:
    weights = load(write(tmp_path, tensors))
    layer, name = weights.layers[0], "model.layers.0."
    parts = [tensors[f"{name}self_attn.{each}_proj.weight"] for each in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts))
    parts = [tensors[f"{name}mlp.{each}_proj.weight"] for each in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(parts))
    assert torch.equal(layer.output, tensors[f"{name}self_attn.o_proj.weight"])
    assert torch.equal(layer.down, tensors[f"{name}mlp.down_proj.weight"])
    assert torch.equal(layer.input_norm, tensors[f"{name}input_layernorm.weight"])
    assert torch.equal(layer.post_norm, tensors[f"{name}post_attention_layernorm.weight"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    assert torch.equal(weights.head, tensors["lm_head.weight"])


def test_weights_take_the_dtype_that_is_asked_for(tmp_path: Path, tensors: Tensors) -> None:
    weights = load(write_single(tmp_path, tensors), torch.bfloat16)
    assert torch.equal(weights.head, tensors["lm_head.weight"].bfloat16())


def test_a_tied_head_is_the_embedding_even_where_a_copy_is_stored(
    tmp_path: Path, tensors: Tensors
) -> None:
    write_single(tmp_path, tensors)
    write_config(tmp_path, tied=True)
    weights = load(tmp_path)
    assert weights.head is weights.embedding


@pytest.mark.parametrize("write", WRITERS)
def test_a_missing_tensor_is_named(tmp_path: Path, tensors: Tensors, write: Writer) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is missing"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize("write", WRITERS)
def test_an_unknown_tensor_is_named_with_its_shape(
    tmp_path: Path, tensors: Tensors, write: Writer
) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(HIDDEN)
    with pytest.raises(ConfigError, match=r"q_proj\.bias \[32\] is not part of LlamaForCausalLM"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize("write", WRITERS)
def test_a_wrong_shape_is_named(tmp_path: Path, tensors: Tensors, write: Writer) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(HIDDEN, INNER + 32)
    with pytest.raises(ConfigError, match=r"down_proj\.weight is \[32, 96\].*\[32, 64\]"):
        load(write(tmp_path, tensors))


def test_a_damaged_or_absent_shard_is_named(tmp_path: Path, tensors: Tensors) -> None:
    write_shards(tmp_path, tensors)
    (tmp_path / "model-1.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is missing or damaged"):
        load(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is missing or damaged"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_a_broken_index_is_named(tmp_path: Path, tensors: Tensors, index: str) -> None:
    write_shards(tmp_path, tensors)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ConfigError, match="holds neither"):
        load(tmp_path)


def card_of(source: Path) -> ModelCard:
    return ModelCard(
        folder="",
        source=str(source),
        name="m",
        revision="",
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        context_window=128,
        eos_token_ids=(0,),
        bos_token="",
        eos_token="",
    )


def test_a_card_loads_as_configured(tmp_path: Path, tensors: Tensors) -> None:
    card = card_of(write_gguf(tmp_path, tensors))
    engine = EngineConfig(block_size=8, max_model_len=100)
    loaded = load_engine_model(card, engine)
    assert loaded.dtype is loaded.model.dtype is torch.bfloat16
    spec = kv_spec(loaded.config, engine, 10_000)
    assert spec.block_bytes == 1 * 2 * 8 * KV_HEADS * HEAD_DIM * 2
    assert spec.num_blocks == 10_000 // spec.block_bytes
    assert effective_window(card, engine) == 100
    assert effective_window(card, EngineConfig(max_model_len=500)) == 128
    assert effective_window(card, EngineConfig()) == 128


def test_a_source_that_went_away_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_engine_model(card_of(tmp_path / "gone.gguf"), EngineConfig())
