"""How a model's RoPE was stretched beyond the context it was first trained on. Free of torch.

Each kind is a small object in `ModelConfig.rope_scaling`; `engine.rope` computes with it. All of
them raise ValueError where their numbers make no sense, naming the number and its limit.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _at_least("factor", self.factor, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: slow frequencies are divided by `factor`, fast ones kept, a blend between.

    A frequency is slow where it turns less than `low_freq_factor` times in `original_context`
    tokens, and fast where it turns more than `high_freq_factor` times. Source: apply_scaling in
    https://github.com/meta-llama/llama-models.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _at_least("factor", self.factor, 1.0)
        _above("low_freq_factor", self.low_freq_factor, 0.0)
        _above("high_freq_factor", self.high_freq_factor, self.low_freq_factor)
        _at_least("original_max_position_embeddings", self.original_context, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: as Llama3Scaling, but blended by dimension, and attention grows sharper.

    `beta_fast` and `beta_slow` are turns in `original_context` tokens; cosines and sines are
    multiplied by `attention_factor`. `truncate` widens the blend to whole dimensions. Source: Peng
    et al., YaRN, https://arxiv.org/abs/2309.00071.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least("factor", self.factor, 1.0)
        _at_least("original_max_position_embeddings", self.original_context, 1)
        _above("attention_factor", self.attention_factor, 0.0)
        _above("beta_slow", self.beta_slow, 0.0)
        _above("beta_fast", self.beta_fast, self.beta_slow)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableScaling:
    """Each frequency has a divisor of its own: what GGUF files keep of Llama 3.1's scaling."""

    divisors: tuple[float, ...]  # [head_dim / 2]

    def __post_init__(self) -> None:
        for divisor in self.divisors:
            _above("divisor", divisor, 0.0)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | TableScaling


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention factor for a context stretched by `factor` (section 3.4 of the paper)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def stretched_context(window: int, scaling: RopeScaling | None) -> int:
    """Positions that a model computes well: its `window`, or what YaRN stretches its context to.

    YaRN is switched on by hand, as Qwen's model cards tell, and the window then left as it was.
    """
    if isinstance(scaling, YarnScaling):
        return max(window, int(scaling.original_context * scaling.factor))
    return window


def _at_least(name: str, value: float, limit: float) -> None:
    if not limit <= value < math.inf:
        raise ValueError(f"RoPE scaling's {name} is {value} and must be at least {limit:g}")


def _above(name: str, value: float, limit: float) -> None:
    if not limit < value < math.inf:
        raise ValueError(f"RoPE scaling's {name} is {value} and must be greater than {limit:g}")
