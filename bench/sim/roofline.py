"""A GPU's data sheet, a model's shape and how near to them the code comes: a timing model.

The roofline model of Williams, Waterman and Patterson (CACM 2009), with an efficiency for each
kind of work and a fixed cost for each kind of step.
"""

from pydantic import BaseModel, ConfigDict, Field

from bench.sim.timing import Floor, Timing
from core.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Device(_Section):
    """One GPU, as its maker describes it. The usable part of the memory holds weights and KV."""

    peak_flops: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    usable_memory: float = Field(0.9, gt=0, le=1)
    # For activations and the runtime.
    reserved_bytes: float = Field(3.5e9, ge=0)


class ModelShape(_Section):
    """A decoder. The body is what each token is multiplied with; the head only sampled ones."""

    parameters: float = Field(gt=0)
    body_parameters: float = Field(gt=0)
    parameter_bytes: float = Field(2, gt=0)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    kv_value_bytes: float = Field(2, gt=0)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token over all layers."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return round(values * self.kv_value_bytes)

    @property
    def pair_flops(self) -> float:
        """Of a query and a key over all heads and layers: a score, and a weighted value."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim


class Efficiency(_Section):
    """The share of the peak that each kind of work reaches, and what steps cost besides."""

    linear: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    kv_read: float = Field(gt=0, le=1)
    piece_factor: float = Field(1.15, ge=1)
    prefill_base_s: float = Field(ge=0)
    decode_base_s: float = Field(gt=0)
    decode_seq_s: float = Field(ge=0)


class Link(_Section):
    """What KV travels over, and what a message takes."""

    bytes_per_s: float = Field(gt=0)
    piece_s: float = Field(0.0, ge=0)
    fixed_s: float = Field(1e-3, ge=0)
    control_s: float = Field(0.0, ge=0)


class Roofline(_Section):
    """All of it, as a profile file has it."""

    name: str
    device: Device
    model: ModelShape
    efficiency: Efficiency
    link: Link

    def timing(self) -> Timing:
        """The coefficients. Raises ConfigError where the model does not fit the memory."""
        device, model, reached = self.device, self.model, self.efficiency
        return Timing(
            name=self.name,
            prefill_base_s=reached.prefill_base_s,
            prefill_token_s=2 * model.body_parameters / (reached.linear * device.peak_flops),
            prefill_pair_s=model.pair_flops / (reached.attention * device.peak_flops),
            piece_factor=reached.piece_factor,
            decode_base_s=reached.decode_base_s,
            decode_seq_s=reached.decode_seq_s,
            decode_token_s=model.kv_token_bytes / (reached.kv_read * device.memory_bytes_per_s),
            kv_tokens=self._kv_tokens(),
            kv_token_bytes=model.kv_token_bytes,
            num_layers=model.num_layers,
            link_bytes_per_s=self.link.bytes_per_s,
            link_piece_s=self.link.piece_s,
            link_fixed_s=self.link.fixed_s,
            control_s=self.link.control_s,
            floor=Floor(
                flops_per_s=device.peak_flops,
                bytes_per_s=device.memory_bytes_per_s,
                weight_bytes=model.body_parameters * model.parameter_bytes,
                token_flops=2 * model.body_parameters,
                pair_flops=model.pair_flops,
                kv_token_bytes=model.kv_token_bytes,
            ),
        )

    def _kv_tokens(self) -> int:
        device, model = self.device, self.model
        weights = model.parameters * model.parameter_bytes
        left = device.memory_bytes * device.usable_memory - device.reserved_bytes - weights
        if left < model.kv_token_bytes:
            raise ConfigError(
                f"{self.name}: device.memory_bytes {device.memory_bytes:g}: the weights take "
                f"{weights / 1e9:.1f} GB and the runtime "
                f"{device.reserved_bytes / 1e9:.1f} GB: nothing of "
                f"{device.memory_bytes * device.usable_memory / 1e9:.1f} GB is left for KV"
            )
        return int(left // model.kv_token_bytes)
