"""Every decoder computes what transformers computes, from the folder that transformers saves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.hf_config import config_from_hf
from engine.model_config import ModelConfig

# The prompts go up to position 122: far beyond an original context of 32.
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
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
GROUP_OF_3 = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60}
GROUP_OF_8 = {"num_attention_heads": 8, "num_key_value_heads": 1}
GROUP_OF_1 = {"num_key_value_heads": 4}
WIDE_HEADS = {"head_dim": 24}  # hidden / heads is 16
TIED = {"tie_word_embeddings": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUP_OF_3),
    "llama-linear": ("Llama", GROUP_OF_1 | TIED | {"rope_parameters": LINEAR}),
    "llama-llama3": ("Llama", GROUP_OF_8 | WIDE_HEADS | {"rope_parameters": LLAMA3}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 12.0}},
    ),
    "llama-biases": ("Llama", TIED | {"attention_bias": True, "mlp_bias": True}),
    "mistral": (
        "Mistral",
        WIDE_HEADS | {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "mistral-window-as-long-as-context": ("Mistral", GROUP_OF_3 | {"sliding_window": 256}),
    "qwen2": ("Qwen2", TIED),
    "qwen2-yarn": ("Qwen2", GROUP_OF_8 | {"rope_parameters": YARN}),
    "qwen2-window-off": ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}),
    "qwen2-window-of-later-layers": (
        "Qwen2",
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", TIED | GROUP_OF_3 | WIDE_HEADS),
    "qwen3-biases-yarn": (
        "Qwen3",
        {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}
        | {"rope_parameters": YARN | {"attention_factor": 1.1, "truncate": False}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_gives_transformers_logits_and_tokens(
    tmp_path: Path,
    case: str,
    build_model: Callable[..., PreTrainedModel],
    answer: Callable[[Path], Any],
    assert_equal: Callable[[PreTrainedModel, Any], None],
) -> None:
    kind, settings = CASES[case]
    model = build_model(kind, **settings)
    # Every other case is saved in shards.
    sharded = list(CASES).index(case) % 2
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(sharded)
    assert_equal(model, answer(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_both_styles_of_config_give_one_config(
    tmp_path: Path, case: str, build_model: Callable[..., PreTrainedModel]
) -> None:
    kind, settings = CASES[case]
    build_model(kind, **settings).config.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    config = config_from_hf(new, "new")

    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    # The oldest files say "type", and leave plain RoPE out.
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope == {"type": "default"} else rope
    assert config_from_hf(old, "old") == config


def test_what_a_config_leaves_out_is_what_transformers_takes(
    build_model: Callable[..., PreTrainedModel],
) -> None:
    needed = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": 4096,
    }

    def read(architecture: str) -> ModelConfig:
        return config_from_hf(needed | {"architectures": [architecture]}, "m")

    llama, mistral, qwen2, qwen3 = (
        read(f"{name}ForCausalLM") for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    )
    for config in (llama, mistral, qwen2, qwen3):
        assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
        assert not config.tie_embeddings
        assert config.rope_scaling is None
    assert [each.num_kv_heads for each in (llama, mistral, qwen2, qwen3)] == [32, 8, 32, 32]
    assert [each.head_dim for each in (llama, mistral, qwen2, qwen3)] == [128] * 4
    assert read("Qwen3ForCausalLM").qk_norm


def test_yarn_stretches_a_context_that_was_left_as_it_was() -> None:
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    }
    assert config_from_hf(values, "m").context_window == 131072
    assert config_from_hf(values | {"rope_scaling": None}, "m").context_window == 32768
