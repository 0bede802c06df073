"""From a model card to a model that computes."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.model_card import ModelCard
from engine.device import Placed
from engine.fp8 import Fp8Linear, check_fp8, others_on
from engine.fp8_kv import HEAD_DIM_MULTIPLE
from engine.fp8_numbers import FP8
from engine.gguf_weights import GgufSource
from engine.hf_folder import HfFolder
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvSpec
from engine.llama import LayerLinear, LlamaModel
from engine.model_config import ModelConfig
from engine.parallel.group import RankGroup
from engine.parallel.shard import WHOLE, Shard
from engine.preflight import check_memory, weight_bytes
from engine.weights import ModelSource, load_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CPU = torch.device("cpu")
_ON_CPU = Placed(device=_CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, or a rank's part of it. `config` is the whole model's."""

    model: LlamaModel
    config: ModelConfig
    dtype: torch.dtype


def load_engine_model(
    card: ModelCard,
    engine_config: EngineConfig,
    progress: bool = False,
    placed: Placed = _ON_CPU,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Loads the card's weights. Takes seconds to minutes: keep it off an event loop.

    With a `group` they are this rank's; `check_ranks` has been asked before.

    Raises ConfigError with one clear line where the source is missing, damaged or unsupported, and,
    before any weight is read, where a GPU is too small for it.
    """
    dtype = DTYPES[engine_config.dtype]
    source = open_source(Path(card.source))
    config = source.config()
    shard = group.shard if group is not None else WHOLE
    mine = shard.config(config)
    fp8 = engine_config.quantisation == "fp8"
    if fp8:
        check_fp8(mine, dtype, placed.gpu.capability if placed.gpu else None)
    block = kv_spec(mine, engine_config).block_bytes
    if placed.gpu is not None:
        check_memory(
            placed.gpu,
            model_bytes=weight_bytes(mine, dtype.itemsize, FP8.itemsize if fp8 else None),
            window_kv_bytes=block
            * -(-effective_window(card, engine_config) // engine_config.block_size),
            share=engine_config.gpu_memory_share,
            num_workers=placed.sharing,
        )
    grouped_rows = engine_config.quantised_rows if dtype == torch.bfloat16 and not fp8 else 0
    if group is not None:
        grouped_rows = 0  # groups of 32 inputs are not cut
    kernels = choose_kernels(
        engine_config.kernels,
        dtype,
        config.head_dim,
        grouped_rows,
        attention=engine_config.attention,
        device=placed.device,
        block_size=engine_config.block_size,
        kv_fp8=engine_config.kv_fp8,
    )
    # In FP8 they go through the host's memory: as they are, a GPU may not hold them.
    weights = load_weights(source, config, dtype, progress, _CPU if fp8 else placed.device, shard)
    layer_linear: LayerLinear | None = None
    if fp8:
        weights = others_on(weights, placed.device)
        layer_linear = partial(Fp8Linear, device=placed.device)
    groups = None
    if kernels.name == "native" and grouped_rows and isinstance(source, GgufSource):
        groups = source.groups(config)
    model = LlamaModel(config, weights, kernels, groups, layer_linear, group)
    return LoadedModel(model=model, config=config, dtype=dtype)


def open_source(path: Path) -> ModelSource:
    """A GGUF file, or a Hugging Face folder."""
    return HfFolder(path) if path.is_dir() else GgufSource(path)


def kv_spec(
    config: ModelConfig,
    engine_config: EngineConfig,
    kv_bytes: int | None = None,
    ranks: int = 1,
) -> KvSpec:
    """The largest KV pool of this model in `kv_bytes`, or one block where none are given.

    It is shared by `ranks` ranks. Raises ConfigError where no block fits, or the heads cannot be
    kept in the type that is wanted.
    """
    fp8 = engine_config.kv_fp8
    if fp8 and config.head_dim % HEAD_DIM_MULTIPLE:
        raise ConfigError(
            "engine.kv_cache_dtype: fp8_e4m3 needs heads of a multiple of "
            f"{HEAD_DIM_MULTIPLE} dims; the model's have {config.head_dim}"
        )
    one = KvSpec(
        num_blocks=1,
        num_layers=config.num_layers,
        block_size=engine_config.block_size,
        num_kv_heads=Shard(0, ranks).config(config).num_kv_heads,
        head_dim=config.head_dim,
        ranks=ranks,
        dtype=FP8 if fp8 else DTYPES[engine_config.dtype],
    )
    if kv_bytes is None:
        return one
    return replace(one, num_blocks=one.num_blocks_for(kv_bytes))


def effective_window(card: ModelCard, engine_config: EngineConfig) -> int:
    """Tokens that prompt and answer may have together: the model's window or the configured cap."""
    return min(card.context_window, engine_config.max_model_len or card.context_window)
