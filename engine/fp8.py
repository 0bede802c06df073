"""Matrix products in FP8: a scale for each output of a weight, and one for each row as it comes.

Both are quantised as `engine.fp8_numbers` says. Products are summed in float32 and multiplied by
both scales.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ConfigError
from engine.fp8_numbers import quantise
from engine.linear import release
from engine.llama import LayerWeights, LlamaWeights
from engine.model_config import ModelConfig

_MULTIPLE = 16  # of a product's sides, as tensor cores take them
_LEAST_CAPABILITY = (8, 9)


class Fp8Linear:
    """A weight [out, in] in FP8 on `device`. Takes the weight over and frees its memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        numbers, scales = quantise(weight)
        release(weight)
        self._numbers = numbers.to(device)
        self._scales = scales.t().contiguous().to(device)  # [1, out]
        self._bias = None if bias is None else bias.to(device)

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        numbers, scales = quantise(rows)
        out: Tensor = torch._scaled_mm(
            numbers,
            self._numbers.t(),
            scale_a=scales,
            scale_b=self._scales,
            out_dtype=torch.bfloat16,
        )
        if self._bias is not None:
            out += self._bias
        return out.to(dtype or rows.dtype)

    def gather(self, ids: Tensor) -> Tensor:
        """Rows of the weight as it was quantised, in bfloat16."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._numbers):
            raise IndexError(f"an id outside [0, {len(self._numbers)})")
        numbers = F.embedding(ids, self._numbers.float()) * self._scales[0, ids, None]
        return numbers.bfloat16()


def check_fp8(config: ModelConfig, dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Raises ConfigError, in one line, where the layers cannot be computed in FP8.

    `capability` is the GPU's; None on a CPU.
    """
    if dtype != torch.bfloat16:
        raise ConfigError("engine.quantisation: fp8 is for engine.dtype bfloat16")
    if capability is not None and capability < _LEAST_CAPABILITY:
        raise ConfigError(
            "engine.quantisation: fp8 needs compute capability {}.{}; this GPU has {}.{}".format(
                *_LEAST_CAPABILITY, *capability
            )
        )
    sides = {
        "hidden_size": config.hidden_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "num_kv_heads * head_dim": config.num_kv_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sides.items():
        if size % _MULTIPLE:
            raise ConfigError(
                f"engine.quantisation: fp8 needs multiples of {_MULTIPLE}; the model's {name} "
                f"is {size}"
            )


def others_on(weights: LlamaWeights, device: torch.device) -> LlamaWeights:
    """Everything but the layers' matrices on `device`: these move once they are quantised."""
    embedding = weights.embedding.to(device)
    return replace(
        weights,
        embedding=embedding,
        head=embedding if weights.head is weights.embedding else weights.head.to(device),
        final_norm=weights.final_norm.to(device),
        layers=tuple(_others_of_layer(layer, device) for layer in weights.layers),
    )


def _others_of_layer(layer: LayerWeights, device: torch.device) -> LayerWeights:
    qk_norm = layer.qk_norm
    if qk_norm is not None:
        qk_norm = (qk_norm[0].to(device), qk_norm[1].to(device))
    # Biases move with their matrices.
    return replace(
        layer,
        input_norm=layer.input_norm.to(device),
        post_norm=layer.post_norm.to(device),
        qk_norm=qk_norm,
    )
