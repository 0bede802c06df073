"""The frequencies of rotary position embeddings, plain or scaled.

Source of RoPE: Su et al., RoFormer, https://arxiv.org/abs/2104.09864. The numbers are computed in
float32, as transformers does: at a position of 100,000 a last bit is already visible in the angle.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_config import ModelConfig
from engine.rope_scaling import Llama3Scaling, TableScaling, YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """A token at position p turns pair i of each head by the angle p * inverse[i]."""

    inverse: Tensor  # [head_dim / 2] float32, radians per token
    attention_factor: float  # cosines and sines are multiplied by it


def rope_frequencies(config: ModelConfig) -> RopeFrequencies:
    """The frequencies that `config` asks for."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    attention_factor = 1.0
    if scaling is None:
        inverse = plain
    elif isinstance(scaling, Llama3Scaling):
        inverse = _llama3(plain, scaling)
    elif isinstance(scaling, YarnScaling):
        inverse = _yarn(plain, config.rope_theta, scaling)
        attention_factor = scaling.attention_factor
    elif isinstance(scaling, TableScaling):
        inverse = plain / torch.tensor(scaling.divisors, dtype=torch.float32)
    else:
        inverse = plain / scaling.factor
    return RopeFrequencies(inverse=inverse, attention_factor=attention_factor)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context / (2 * math.pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    head_dim = 2 * len(plain)

    def pair_with(turns: float) -> float:
        """The pair, a fraction of one too, that turns so often within the original context."""
        wavelength = scaling.original_context / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step, without dividing by zero
    slowed = ((torch.arange(len(plain), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / scaling.factor * slowed + plain * (1 - slowed)
