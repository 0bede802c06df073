"""The shape of a decoder, read from GGUF metadata and the names of the tensors.

Keys: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What they
mean where it says nothing: llama.cpp, src/llama-model.cpp and ggml's rope.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from engine.config_values import ConfigValues
from engine.model_config import ModelConfig
from engine.rope_scaling import (
    LinearScaling,
    RopeScaling,
    TableScaling,
    YarnScaling,
    stretched_context,
    yarn_mscale,
)

# Mistral models call themselves llama.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_KINDS = ("none", "linear", "yarn")
# Keys that would change what is computed, and the values that change nothing.
_NEUTRAL = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "expert_count": 0,
    "attention.temperature_scale": 0.0,
}


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: tuple[float, ...] | None,
    source: str,
) -> ModelConfig:
    """Reads GGUF metadata. `tensor_shapes` are in torch's order, outermost first.

    `rope_divisors` is what tensor rope_freqs.weight holds, None where there is none. Raises
    ConfigError that names `source` and the key.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{source}: architecture {name!r} is not supported; supported: {known}")
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    read = ConfigValues(values=own, place=f"{source}: the metadata", prefix=f"{name}.")
    if "token_embd.weight" not in tensor_shapes:
        raise ConfigError(f"{source}: tensor token_embd.weight is missing")
    _refuse_unsupported(read)
    num_heads, hidden_size = read.whole("attention.head_count"), read.whole("embedding_length")
    head_dim = read.whole("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.whole(key, head_dim) != head_dim:
            raise read.error(key, f"is not supported: the heads have {head_dim} dimensions")
    layer = {each.removeprefix("blk.0.") for each in tensor_shapes if each.startswith("blk.0.")}
    try:
        scaling = _rope_scaling(read, rope_divisors)
        config = ModelConfig(
            architecture=_ARCHITECTURES[name],
            num_layers=read.whole("block_count"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=read.whole("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=read.whole("feed_forward_length"),
            rope_theta=read.number("rope.freq_base", 10000.0),
            rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
            vocab_size=tensor_shapes["token_embd.weight"][0],
            tie_embeddings="output.weight" not in tensor_shapes,
            context_window=stretched_context(read.whole("context_length"), scaling),
            rope_scaling=scaling,
            # No key tells of biases: the first layer's tensors do, and the other layers follow.
            qkv_bias=name == "qwen2" or not layer.isdisjoint(f"attn_{each}.bias" for each in "qkv"),
            output_bias="attn_output.bias" in layer,
            mlp_bias=not layer.isdisjoint(f"ffn_{each}.bias" for each in ("gate", "up", "down")),
            qk_norm=name == "qwen3",
        )
    except ValueError as error:
        raise ConfigError(f"{read.place}: {error}") from error
    if read.whole("attention.sliding_window", config.context_window) < config.context_window:
        raise read.error(
            "attention.sliding_window",
            f"is not supported where it is smaller than the context of {config.context_window}",
        )
    return config


def _refuse_unsupported(read: ConfigValues) -> None:
    for key, neutral in _NEUTRAL.items():
        if read.number(key, neutral) != neutral:
            raise read.error(key, "is not supported")


def _rope_scaling(
    read: ConfigValues, rope_divisors: tuple[float, ...] | None
) -> RopeScaling | None:
    """None: plain RoPE. Raises ValueError where the numbers make no sense."""
    # Files older than the type have a factor alone, under an older key; 0 is for none.
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 0.0))
    kind = read.text("rope.scaling.type", "linear" if factor else "none")
    if kind not in _ROPE_KINDS:
        raise read.error(
            "rope.scaling.type", f"is not supported; supported: {', '.join(_ROPE_KINDS)}"
        )
    if rope_divisors is not None:
        if kind != "none":
            raise read.error(
                "rope.scaling.type", "is not supported beside tensor rope_freqs.weight"
            )
        return TableScaling(divisors=rope_divisors)
    if kind == "none" or (kind == "linear" and factor == 0):
        return None
    if kind == "linear":
        return LinearScaling(factor=factor)
    return YarnScaling(
        factor=factor,
        original_context=read.whole("rope.scaling.original_context_length"),
        attention_factor=read.number("rope.scaling.attn_factor", 1.0) * yarn_mscale(factor),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
    )
