"""The shape of a decoder, read from a Hugging Face config.json.

Both styles are read: `rope_theta` and `rope_scaling` of transformers 4, and `rope_parameters` of
transformers 5. Source: transformers' configuration classes of the four architectures.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from engine.config_values import ConfigValues
from engine.model_config import ModelConfig
from engine.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    stretched_context,
    yarn_mscale,
)

# What a config.json may leave out, and what transformers then takes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def config_from_hf(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Reads a config.json. Raises ConfigError that names `source` and the key."""
    architecture = _architecture(values, source)
    read = ConfigValues(
        values=_DEFAULTS[architecture] | dict(values), place=f"{source}: config.json"
    )
    _refuse_unsupported(read)
    num_heads, hidden_size = read.whole("num_attention_heads"), read.whole("hidden_size")
    biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and read.flag(
        "attention_bias"
    )
    try:
        scaling = _rope_scaling(read)
        config = ModelConfig(
            architecture=architecture,
            num_layers=read.whole("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=read.whole("num_key_value_heads", num_heads),
            head_dim=read.whole("head_dim", hidden_size // max(num_heads, 1)),
            intermediate_size=read.whole("intermediate_size"),
            rope_theta=_rope(read).number("rope_theta", read.number("rope_theta", 10000.0)),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            vocab_size=read.whole("vocab_size"),
            tie_embeddings=read.flag("tie_word_embeddings"),
            context_window=stretched_context(read.whole("max_position_embeddings"), scaling),
            rope_scaling=scaling,
            qkv_bias=biased or architecture == "Qwen2ForCausalLM",
            output_bias=biased,
            mlp_bias=architecture == "LlamaForCausalLM" and read.flag("mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
    except ValueError as error:
        raise ConfigError(f"{read.place}: {error}") from error
    _refuse_sliding_window(read, config)
    return config


def _architecture(values: Mapping[str, Any], source: str) -> str:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not name:  # a config that was saved without its model
        name = values.get("model_type")
        kinds = {each.removesuffix("ForCausalLM").lower(): each for each in _DEFAULTS}
        name = kinds.get(str(name), name)
    if not isinstance(name, str) or name not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise ConfigError(f"{source}: architecture {name!r} is not supported; supported: {known}")
    return name


def _refuse_unsupported(read: ConfigValues) -> None:
    for key in ("quantization_config", "use_mrope"):
        if read.values.get(key):
            raise read.error(key, "is not supported")
    if read.text("hidden_act", "silu") != "silu":
        raise read.error("hidden_act", "is not supported; supported: silu")
    rope = _rope(read)
    for settings in (read, rope):
        if settings.number("partial_rotary_factor", 1.0) != 1.0:
            raise settings.error(
                "partial_rotary_factor", "is not supported: RoPE turns whole heads"
            )
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise rope.error(key, "is not supported: RoPE is the same in every layer")


def _rope(read: ConfigValues) -> ConfigValues:
    return read.inner("rope_scaling" if read.values.get("rope_scaling") else "rope_parameters")


def _rope_scaling(read: ConfigValues) -> RopeScaling | None:
    """None: plain RoPE. Raises ValueError where the numbers make no sense."""
    rope = _rope(read)
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(key, "default")
    if kind not in _ROPE_KINDS:
        raise rope.error(key, f"is not supported; supported: {', '.join(_ROPE_KINDS)}")
    if kind == "default":
        return None
    factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    key = "original_max_position_embeddings"
    # Where both are given the outer one counts, as in transformers.
    original = read.whole(key) if read.has(key) else rope.whole(key)
    if kind == "llama3":
        return Llama3Scaling(
            factor=factor,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=original,
        )
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: ConfigValues, factor: float) -> float:
    """Given as such, or as DeepSeek's quotient of two weights, or as the paper suggests."""
    mscale, all_dims = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    derived = yarn_mscale(factor)
    if mscale and all_dims:
        derived = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dims)
    return rope.number("attention_factor", derived)


def _refuse_sliding_window(read: ConfigValues, config: ModelConfig) -> None:
    """A window as long as the context is none."""
    if not read.has("sliding_window"):
        return
    if config.architecture in _QWEN:
        if not read.flag("use_sliding_window"):
            return
        kinds = read.values.get("layer_types")
        if isinstance(kinds, list):
            slides = any(kind != "full_attention" for kind in kinds)
        else:
            slides = read.whole("max_window_layers", 28) < config.num_layers
        if not slides:
            return
    if read.whole("sliding_window") < config.context_window:
        raise read.error(
            "sliding_window",
            f"is not supported where it is smaller than the context of {config.context_window}",
        )
