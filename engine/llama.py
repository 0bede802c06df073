"""A decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged KV pool.

The layers are a loop: a step is one pass over the tokens of all its sequences, concatenated, and
only the attention knows which token belongs to which sequence. What some models have and others
have not (biases, QK-norm, a scaled RoPE) comes with weights and config; how it is computed is the
kernels' business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionRow, QkNorm, Rotation, StepAttention
from engine.graphs import DecodeInputs, ReplayableAttention
from engine.grouped import NO_GROUPS, GroupedModel, GroupedWeight
from engine.kernels import Kernels, Linear
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.parallel.group import RankGroup
from engine.parallel.products import GatheredHead, SharedTable, SummedLinear
from engine.rope import rope_frequencies
from engine.torch_kernels import TorchKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. H heads, K KV heads of D dimensions; every matrix is [out, in].

    None is for what the model does not have.
    """

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2 K) * D, hidden]
    output: Tensor  # [hidden, H * D]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None = None  # [(H + 2 K) * D]
    output_bias: Tensor | None = None  # [hidden]
    gate_up_bias: Tensor | None = None  # [2 * intermediate]
    down_bias: Tensor | None = None  # [hidden]
    qk_norm: tuple[Tensor, Tensor] | None = None  # [D] for each query head, [D] for each key head


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """The whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens of one step, all its sequences' one after another."""

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    rows: tuple[AttentionRow, ...]  # which tokens are whose
    sample_rows: Tensor  # int64: the tokens whose logits are wanted


# A weight [out, in] and its bias.
LayerLinear = Callable[[Tensor, Tensor | None], Linear]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer with its matrices as the kernels have them."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: QkNorm | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """The forward pass. Takes the matrices of `weights` over: the kernels may repack them.

    `groups` are the same matrices as they were quantised, where the kernels should have them too.
    `layer_linear` makes the layers' products, where those shall be others than the kernels'.
    With a `group` the weights are this rank's, and all ranks compute each step together; `config`
    is the whole model's all the same.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        kernels: Kernels | None = None,
        groups: GroupedModel | None = None,
        layer_linear: LayerLinear | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self.config = config
        self._group = group
        self.dtype = weights.embedding.dtype
        self._kernels = kernels or TorchKernels()
        self._layer_linear = layer_linear
        self._frequencies = rope_frequencies(config)
        self._inverse = self._frequencies.inverse.to(weights.embedding.device)
        grouped = groups.layers if groups else (NO_GROUPS,) * len(weights.layers)
        self._layers = tuple(map(self._prepared, weights.layers, grouped))
        self._final_norm = weights.final_norm
        tied = weights.head is weights.embedding
        num_words = len(weights.embedding)
        self._head = self._kernels.linear(
            weights.head, lookup=tied, groups=groups.head if groups else None
        )
        # A tied table exists once, in the form that the output projection has.
        table = weights.embedding
        self._embed: Callable[[Tensor], Tensor] = (
            self._head.gather if tied else lambda ids: F.embedding(ids, table)
        )
        self._logits: Callable[[Tensor], Tensor] = partial(self._head, dtype=torch.float32)
        if group is not None:
            self._embed = SharedTable(self._embed, num_words, group)
            self._logits = GatheredHead(self._head, config.vocab_size, group)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self._inverse.device

    @property
    def replayable(self) -> bool:
        """Whether `forward_decode` can be called."""
        return isinstance(self._kernels.attention, ReplayableAttention)

    @property
    def kernels_name(self) -> str:
        """Which kernels compute it."""
        return self._kernels.name

    def forward(
        self, step: StepTokens, kv: KvCache, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Final hidden states of the rows that are wanted, [len(sample_rows), hidden].

        `logits` makes their logits. The KV of all tokens is written to the pool; `on_layer` is
        called once that of a layer is there.
        """
        rotation = self._rotation(step.positions)
        attention = self._kernels.attention.begin(kv, step.rows, rotation)
        return self._pass(step.token_ids, attention, step.sample_rows, on_layer)

    def forward_decode(self, inputs: DecodeInputs, kv: KvCache) -> Tensor:
        """Final hidden states of a step of single tokens, [rows, hidden], from tensors alone.

        For attention that is `ReplayableAttention`.
        """
        attention = self._kernels.attention
        assert isinstance(attention, ReplayableAttention)
        step = attention.begin_decode(kv, inputs.tensors, self._rotation(inputs.positions))
        return self._pass(inputs.token_ids, step, None, None)

    def _pass(
        self,
        token_ids: Tensor,
        attention: StepAttention,
        sample_rows: Tensor | None,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """The layers; without `sample_rows` the hidden states of every token."""
        hidden = self._embed(token_ids)  # [tokens, hidden]
        delta = None  # what the last matrix has made and `hidden` has not got yet
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.input_norm, delta)
            mixed = attention(index, layer.qkv(normed), layer.qk_norm)
            if on_layer is not None and self._group is None:
                on_layer(index)
            if index == len(self._layers) - 1 and sample_rows is not None:
                # From here on only these rows are wanted.
                hidden, mixed = hidden[sample_rows], mixed[sample_rows]
            added = layer.output(mixed)
            if on_layer is not None and self._group is not None:
                on_layer(index)  # by their sum, the other ranks have written theirs too
            normed = self._norm(hidden, layer.post_norm, added)
            delta = layer.down(self._kernels.swiglu(layer.gate_up(normed)))
        if self._group is not None and not len(hidden):
            self._group.meet()  # nothing was summed since the last attention wrote
        return self._norm(hidden, self._final_norm, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [rows, hidden] to logits, float32 [rows, vocab].

        Of several ranks, the first alone gets them; to the others they are [rows, 0].
        """
        return self._logits(hidden)

    def _norm(self, hidden: Tensor, weight: Tensor, delta: Tensor | None) -> Tensor:
        return self._kernels.norm(hidden, weight, self.config.rms_norm_eps, delta)

    def _rotation(self, positions: Tensor) -> Rotation:
        angles = positions.float()[:, None] * self._inverse  # [tokens, D / 2]
        factor = self._frequencies.attention_factor
        return Rotation(cos=angles.cos() * factor, sin=angles.sin() * factor)

    def _summed(self, part: Linear) -> Linear:
        """A product whose inputs are shared by the ranks."""
        return part if self._group is None else SummedLinear(part, self._group)

    def _prepared(self, layer: LayerWeights, groups: Mapping[str, GroupedWeight]) -> _Layer:

        def linear(weight: Tensor, bias: Tensor | None, groups: GroupedWeight | None) -> Linear:
            if self._layer_linear is not None:
                return self._layer_linear(weight, bias)
            return self._kernels.linear(weight, bias, groups=groups)

        qk_norm = None
        if layer.qk_norm is not None:
            query, key = layer.qk_norm
            qk_norm = QkNorm(query=query, key=key, eps=self.config.rms_norm_eps)
        return _Layer(
            input_norm=layer.input_norm,
            qkv=linear(layer.qkv, layer.qkv_bias, groups=groups.get("qkv")),
            qk_norm=qk_norm,
            output=self._summed(
                linear(layer.output, layer.output_bias, groups=groups.get("output"))
            ),
            post_norm=layer.post_norm,
            gate_up=linear(layer.gate_up, layer.gate_up_bias, groups=groups.get("gate_up")),
            down=self._summed(linear(layer.down, layer.down_bias, groups=groups.get("down"))),
        )
