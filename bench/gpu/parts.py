"""Models, pools and steps of random numbers, as the checks need them."""

import torch
from torch import Tensor

from core.messages import SamplingParams, TransferId
from engine.kernels import Kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LayerLinear, LayerWeights, LlamaModel, LlamaWeights
from engine.model_config import ModelConfig
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch

BLOCK_SIZE = 16
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    layer_linear: LayerLinear | None = None,
) -> LlamaModel:
    """Weights of such sizes that numbers neither grow nor fade; always the same for a device."""
    generator = torch.Generator(device).manual_seed(1)
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim

    def matrix(outputs: int, inputs: int) -> Tensor:
        weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
        return weight.normal_(std=inputs**-0.5, generator=generator)

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=dtype, device=device)

    layers = tuple(
        LayerWeights(
            input_norm=ones(),
            qkv=matrix(rows + 2 * kv_rows, hidden),
            output=matrix(hidden, rows),
            post_norm=ones(),
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )
        for _ in range(config.num_layers)
    )
    weights = LlamaWeights(
        embedding=matrix(config.vocab_size, hidden),
        layers=layers,
        final_norm=ones(),
        head=matrix(config.vocab_size, hidden),
    )
    return LlamaModel(config, weights, kernels, None, layer_linear)


def pool(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_blocks: int) -> KvCache:
    """A pool of numbers as keys and values have them."""
    spec = KvSpec(
        num_blocks=num_blocks,
        num_layers=config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    kv = KvCache(spec, device=device)
    kv.pool.normal_()
    return kv


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def step(*parts: tuple[int, int, list[int]], per_row: int) -> StepBatch:
    """Items (row, start, tokens); row i's blocks are `per_row` ones of its own. All sample."""
    items = tuple(
        BatchItem(
            key=SequenceKey(TransferId(request_id=str(row), attempt=0)),
            start=start,
            token_ids=tuple(tokens),
            block_ids=tuple(range(row * per_row, (row + 1) * per_row)),
            sample=SampleRequest(params=_GREEDY, position=start + len(tokens)),
        )
        for row, start, tokens in parts
    )
    return StepBatch(items=items)
