"""Decoders from GGUF files compute what transformers computes with the same weights.

The files are written here the way llama.cpp's convert_hf_to_gguf.py writes them.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from core.errors import ConfigError
from engine.loader import open_source
from engine.rope_scaling import LinearScaling, TableScaling, YarnScaling
from engine.weights import load_weights

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN, "num_attention_heads": 6, "head_dim": 16}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
}
Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType = F32,
    change: Change = lambda writer, tensors: None,
) -> Path:
    """The model as a file; its matrices take the values that `kind` keeps of them."""
    config = model.config
    is_llama = config.model_type in ("llama", "mistral")
    writer = gguf.GGUFWriter(path, "llama" if is_llama else config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if is_llama:
        writer.add_rope_dimension_count(head_dim)
    tensors = {}
    add_rope(writer, tensors, config.rope_parameters, head_dim)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            rows = weight.numpy()
            if is_llama and name.split(".")[-2] in heads:
                rows = interleave(rows, heads[name.split(".")[-2]])
            if rows.ndim == 2 and kind != F32:
                kept = dequantize(quantize(weight.numpy(), kind), kind)
                rows = quantize(rows, kind)
                weight.copy_(torch.from_numpy(kept))
            tensors[gguf_name(name)] = np.ascontiguousarray(rows)
    change(writer, tensors)
    for name, rows in tensors.items():
        raw = kind if rows.dtype == np.uint8 else None
        writer.add_tensor(name, rows, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, index, *middle, suffix = name.split(".")
    return f"blk.{index}.{LAYER_NAMES['.'.join(middle)]}.{suffix}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + D/2 of a head become neighbours."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def add_rope(
    writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], rope: dict[str, Any], head_dim: int
) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(rope, head_dim)
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(rope["factor"])
        else:
            kept = (turns - low) / (high - low)
            divisors.append(1 / ((1 - kept) / rope["factor"] + kept))
    assert len(set(divisors)) > 2, "all three bands are met"
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
def test_a_gguf_gives_transformers_logits_and_tokens(
    tmp_path: Path,
    case: str,
    kind: gguf.GGMLQuantizationType,
    build_model: Callable[..., PreTrainedModel],
    answer: Callable[[Path], Any],
    assert_equal: Callable[[PreTrainedModel, Any], None],
) -> None:
    name, settings = CASES[case]
    model = build_model(name, **settings)
    path = write_gguf(model, tmp_path / "m.gguf", kind)
    assert_equal(model, answer(path))


def test_each_scaling_of_rope_is_read(
    tmp_path: Path, build_model: Callable[..., PreTrainedModel]
) -> None:
    def read(case: str, change: Change = lambda writer, tensors: None) -> Any:
        name, settings = CASES[case]
        path = write_gguf(build_model(name, **settings), tmp_path / "m.gguf", change=change)
        return open_source(path).config()

    assert isinstance(read("llama-llama3").rope_scaling, TableScaling)
    assert read("llama-linear-biases").rope_scaling == LinearScaling(factor=4.0)
    assert read("qwen2").rope_scaling is None
    # The older key, and a factor that stands for none.
    old = read("qwen2", lambda writer, tensors: writer.add_float32("qwen2.rope.scale_linear", 2.0))
    assert old.rope_scaling == LinearScaling(factor=2.0)
    none = read("qwen2", lambda writer, tensors: writer.add_float32("qwen2.rope.scale_linear", 0.0))
    assert none.rope_scaling is None

    def sharpen(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        writer.add_rope_scaling_attn_factors(0.5)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    yarn = read("qwen2-yarn", sharpen)
    assert yarn.context_window == 256
    assert yarn.rope_scaling == YarnScaling(
        factor=8.0,
        original_context=32,
        attention_factor=0.5 * (0.1 * math.log(8.0) + 1.0),
        beta_fast=16.0,
    )


def drop(name: str) -> Change:
    return lambda writer, tensors: tensors.pop(name)


def put(name: str, *shape: int, value: float = 0.0) -> Change:
    rows = np.full(shape, value, dtype=np.float32)
    return lambda writer, tensors: tensors.update({name: rows})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen2", drop("blk.1.attn_k.bias"), r"layers\.1\.self_attn\.k_proj\.bias is missing"),
        ("qwen2", drop("blk.0.attn_q.bias"), r"layers\.0\.self_attn\.q_proj\.bias is missing"),
        ("qwen3", drop("blk.0.attn_q_norm.weight"), r"q_norm\.weight is missing"),
        ("mistral", put("blk.1.attn_v.bias", 64), r"v_proj\.bias \[64\] is not part of Llama"),
        ("mistral", put("blk.0.attn_q_norm.weight", 32), r"q_norm\.weight \[32\] is not part"),
        ("qwen2", put("blk.0.attn_q.bias", 65), r"q_proj\.bias is \[65\] and should be \[64\]"),
        ("mistral", put("blk.0.attn_q.bias", 65), r"attn_q\.bias is \[65\], not 4 heads' rows"),
        ("llama-llama3", put("rope_freqs.weight", 3, value=1.0), "3 divisors for heads of 16"),
        ("llama-llama3", put("rope_freqs.weight", 8, value=-1.0), "divisor is -1.0"),
        ("llama-llama3", put("rope_freqs.weight", 2, 4, value=1.0), "no row of float32 numbers"),
        (
            "llama-llama3",
            lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            r"llama\.rope\.scaling\.type \('linear'\) .* beside tensor rope_freqs\.weight",
        ),
        (
            "qwen2",
            lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            r"qwen2\.rope\.scaling\.type \('longrope'\) is not supported; supported: none, linear",
        ),
        (
            "qwen2",
            lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            r"has no qwen2\.rope\.scaling\.original_context_length",
        ),
        ("qwen2-yarn", lambda w, t: w.add_rope_scaling_yarn_log_mul(0.1), "yarn_log_multiplier"),
        ("qwen2-yarn", lambda w, t: w.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor"),
        ("qwen2-yarn", lambda w, t: w.add_rope_scaling_yarn_attn_factor(2.0), "yarn_attn_factor"),
        ("qwen2", lambda w, t: w.add_rope_dimension_count(8), "the heads have 16 dimensions"),
        ("qwen2", lambda w, t: w.add_value_length(8), "the heads have 16 dimensions"),
        (
            "mistral",
            lambda w, t: w.add_sliding_window(128),
            r"sliding_window \(128\) is not supported .* context of 256",
        ),
    ],
)
def test_a_gguf_that_the_engine_cannot_compute_is_refused_by_name(
    tmp_path: Path,
    case: str,
    change: Change,
    message: str,
    build_model: Callable[..., PreTrainedModel],
) -> None:
    name, settings = CASES[case]
    path = write_gguf(build_model(name, **settings), tmp_path / "m.gguf", change=change)
    with pytest.raises(ConfigError, match=message) as caught:
        source = open_source(path)
        load_weights(source, source.config(), torch.float32, progress=False)
    assert "\n" not in caught.value.message


def test_a_window_as_long_as_the_context_is_none(
    tmp_path: Path, build_model: Callable[..., PreTrainedModel]
) -> None:
    path = write_gguf(
        build_model("Qwen2"), tmp_path / "m.gguf", change=lambda w, t: w.add_sliding_window(256)
    )
    assert open_source(path).config().context_window == 256
