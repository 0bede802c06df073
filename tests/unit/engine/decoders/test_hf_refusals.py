"""A folder that is not what it says, or asks for what the engine lacks, is one clear line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from core.errors import ConfigError
from engine.hf_config import config_from_hf
from engine.loader import open_source
from engine.weights import load_weights

NEEDED = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def without(settings: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key}


def scaled(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"rope_scaling": settings | changes}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mixtral", {}, "architecture 'MixtralForCausalLM' is not supported; supported: Llama"),
        ("Qwen2Moe", {}, "architecture 'Qwen2MoeForCausalLM'"),
        *(
            ("Llama", {key: None}, rf"config\.json has no {key}$")
            for key in NEEDED
            if key != "num_key_value_heads"
        ),
        ("Llama", {"hidden_size": "wide"}, r"hidden_size \('wide'\) is no whole number"),
        ("Llama", {"hidden_size": 64.5}, r"hidden_size \(64\.5\) is no whole number"),
        ("Llama", {"vocab_size": True}, r"vocab_size \(True\) is no whole number"),
        ("Llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings .* neither true nor false"),
        ("Llama", {"rms_norm_eps": [1]}, r"rms_norm_eps \(\[1\]\) is no number"),
        ("Llama", {"rope_theta": 10**400}, "rope_theta .* is too large"),
        ("Llama", {"rope_theta": float("inf")}, "rope_theta is inf"),
        ("Llama", {"num_key_value_heads": 3}, "4 attention heads do not share 3 KV heads"),
        ("Qwen3", {"head_dim": 15}, "even head_dim, not 15"),
        ("Llama", {"hidden_act": "gelu"}, r"hidden_act \('gelu'\) is not supported"),
        ("Qwen2", {"quantization_config": {"bits": 4}}, "quantization_config .* not supported"),
        ("Qwen2", {"use_mrope": True}, r"use_mrope \(True\) is not supported"),
        # Sliding windows.
        ("Mistral", {}, r"sliding_window \(4096\) is not supported .* context of 8192"),
        ("Mistral", {"sliding_window": 2048}, r"sliding_window \(2048\)"),
        ("Mistral", {"sliding_window": "far"}, r"sliding_window \('far'\) is no whole number"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, r"sliding_window \(4096\)"),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 128,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            r"sliding_window \(128\)",
        ),
        # RoPE.
        (
            "Llama",
            scaled({"rope_type": "dynamic", "factor": 2.0}),
            r"rope_type \('dynamic'\) is not",
        ),
        ("Llama", scaled({"type": "su"}), r"type \('su'\) is not supported; supported: default"),
        ("Llama", {"rope_parameters": {"rope_type": 3}}, r"rope_parameters\.rope_type \(3\)"),
        ("Llama", {"rope_scaling": [2.0]}, r"rope_scaling \(\[2\.0\]\) is no object"),
        ("Llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor \(0\.5\)"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "RoPE turns whole heads"),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "full_attention .* the same in every layer",
        ),
        ("Llama", scaled({"type": "linear"}), r"config\.json has no rope_scaling\.factor"),
        ("Llama", scaled({"type": "linear", "factor": "x"}), r"rope_scaling\.factor \('x'\)"),
        (
            "Llama",
            scaled({"type": "linear", "factor": 0.5}),
            "factor is 0.5 and must be at least 1",
        ),
        *(
            ("Llama", {"rope_scaling": without(LLAMA3, key)}, rf"has no rope_scaling\.{key}")
            for key in LLAMA3
            if key != "rope_type"
        ),
        ("Llama", scaled(LLAMA3, low_freq_factor=0), "low_freq_factor is 0.0 and must be greater"),
        (
            "Llama",
            scaled(LLAMA3, high_freq_factor=1),
            "high_freq_factor is 1.0 and must be greater",
        ),
        ("Llama", scaled(LLAMA3, factor=float("nan")), "factor is nan and must be at least 1"),
        (
            "Qwen2",
            {"rope_scaling": without(YARN, "original_max_position_embeddings")},
            r"has no rope_scaling\.original_max_position_embeddings",
        ),
        ("Qwen2", scaled(YARN, beta_fast=1), "beta_fast is 1.0 and must be greater than 1"),
        ("Qwen2", scaled(YARN, attention_factor=0), "attention_factor is 0.0 and must be greater"),
        ("Qwen2", scaled(YARN, truncate=1), r"truncate \(1\) is neither true nor false"),
        ("Qwen2", scaled(YARN) | {"rope_theta": 1.0}, "YaRN needs a rope_theta greater than 1"),
    ],
)
def test_a_config_that_the_engine_cannot_compute_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    values = NEEDED | {"architectures": [f"{kind}ForCausalLM"]} | changes
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_hf(values, "some/folder")
    assert caught.value.message.startswith("some/folder: ")
    assert len(caught.value.message) < 200
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 8192}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 128}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 128}),  # from layer 28 on
        ("Qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_window_that_no_layer_has_is_no_obstacle(kind: str, changes: dict[str, Any]) -> None:
    values = NEEDED | {"architectures": [f"{kind}ForCausalLM"], "head_dim": 16} | changes
    assert config_from_hf(values, "m").context_window == 8192


@pytest.mark.parametrize(
    ("kind", "settings", "changes", "message"),
    [
        (
            "Llama",
            {"attention_bias": True},
            {"attention_bias": False},
            r"_proj\.bias \[\d+\] is not",
        ),
        (
            "Llama",
            {},
            {"attention_bias": True},
            r"layers\.0\.self_attn\.k_proj\.bias is missing \(8",
        ),
        (
            "Llama",
            {"mlp_bias": True},
            {"mlp_bias": False},
            r"mlp\.\w+_proj\.bias \[\d+\] is not part",
        ),
        ("Llama", {}, {"mlp_bias": True}, r"layers\.0\.mlp\.down_proj\.bias is missing \(6 in all"),
        (
            "Llama",
            {},
            {"architectures": ["Qwen2ForCausalLM"]},
            r"k_proj\.bias is missing \(6 in all",
        ),
        ("Qwen2", {}, {"architectures": ["LlamaForCausalLM"]}, r"_proj\.bias \[\d+\] is not part"),
        (
            "Llama",
            {},
            {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
            r"_norm\.weight is miss",
        ),
        (
            "Qwen3",
            {"head_dim": 16},
            {"architectures": ["LlamaForCausalLM"]},
            r"_norm\.weight \[16\] is",
        ),
        ("Qwen3", {"head_dim": 16}, {"head_dim": 32}, r"is \[\d+(, 64)?\] and should be \[\d+"),
        (
            "Qwen2",
            {"tie_word_embeddings": True},
            {"tie_word_embeddings": False},
            "lm_head.* is missing",
        ),
        (
            "Llama",
            {},
            {"num_hidden_layers": 1},
            r"model\.layers\.1\.\S+ \[[\d, ]+\] is not part of Llama",
        ),
        (
            "Llama",
            {},
            {"num_hidden_layers": 3},
            r"layers\.2\.input_layernorm\.weight is missing \(9",
        ),
    ],
)
def test_weights_that_the_config_does_not_announce_are_named(
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    build_model: Callable[..., PreTrainedModel],
) -> None:
    build_model(kind, **settings).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_bias_of_the_wrong_length_is_named(
    tmp_path: Path, build_model: Callable[..., PreTrainedModel]
) -> None:
    build_model("Qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.bias"] = torch.zeros(31)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"v_proj\.bias is \[31\] and should be \[32\]"):
        load(tmp_path)


def load(folder: Path) -> None:
    source = open_source(folder)
    load_weights(source, source.config(), torch.float32, progress=False)
