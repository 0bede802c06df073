"""The shape of a decoder, as `engine.hf_config` or `engine.gguf_config` reads it.

What this engine does not compute is refused there by name; nothing is ignored that would change the
model's output.
"""

import math
from dataclasses import dataclass

from engine.rope_scaling import RopeScaling, TableScaling, YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU.

    Raises ValueError where its numbers make no decoder.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    # The output projection is the embedding table.
    tie_embeddings: bool
    # Positions that the model was trained for.
    context_window: int
    rope_scaling: RopeScaling | None = None
    # Query, key and value projections have biases; so have the attention's output projection, and
    # all three of the MLP.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # Each head's queries and keys are normalised before they turn.
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = (
            *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"),
            *("intermediate_size", "rope_theta", "rms_norm_eps", "vocab_size", "context_window"),
        )
        for name in sizes:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"the model's {name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"RoPE needs an even head_dim, not {self.head_dim}")
        scaling = self.rope_scaling
        if isinstance(scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(f"YaRN needs a rope_theta greater than 1, not {self.rope_theta}")
        if isinstance(scaling, TableScaling) and 2 * len(scaling.divisors) != self.head_dim:
            raise ValueError(
                f"RoPE scaling has {len(scaling.divisors)} divisors for heads of {self.head_dim}"
            )
