"""Several ranks compute what one computes: the same tokens, each from its slice of the weights.

The ranks are threads here; their group is gloo's, as it is between processes.
"""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from transformers import PreTrainedModel

from core.config import EngineConfig
from engine.kernels import Kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.loader import kv_spec, open_source
from engine.model_config import ModelConfig
from engine.native.build import ensure_built
from engine.native.kernels import NativeKernels
from engine.parallel.group import RankGroup
from engine.parallel.shard import Shard
from engine.runner import ModelRunner
from engine.step_batch import StepBatch
from engine.torch_kernels import TorchKernels
from engine.weights import ModelSource, load_weights

CPU = torch.device("cpu")
STEPS = 20
TIED = {"tie_word_embeddings": True}
FOUR_OF_EACH = {"num_attention_heads": 4, "num_key_value_heads": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama": (2, "Llama", FOUR_OF_EACH),
    "llama-biases": (2, "Llama", TIED | {"attention_bias": True, "mlp_bias": True}),
    "llama-3": (
        3,
        "Llama",
        TIED | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    ),
    "llama-4": (4, "Llama", FOUR_OF_EACH | TIED),
    "mistral": (2, "Mistral", {"head_dim": 24, "sliding_window": None}),
    # A KV head for two ranks.
    "mistral-4": (4, "Mistral", {"sliding_window": None}),
    "qwen2": (2, "Qwen2", TIED),
    "qwen2-yarn-4": (
        4,
        "Qwen2",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_parameters": YARN},
    ),
    "qwen3": (2, "Qwen3", {"head_dim": 32}),
    "qwen3-4": (4, "Qwen3", TIED | FOUR_OF_EACH | {"head_dim": 24}),
}


class Ranks:
    """All ranks of a model, on threads of their own but the first, over one pool."""

    def __init__(self, source: ModelSource, ranks: int, kernels: Callable[[], Kernels]) -> None:
        self.spec: KvSpec = replace(
            kv_spec(source.config(), EngineConfig(dtype="float32"), ranks=ranks), num_blocks=16
        )
        self.memory = memoryview(bytearray(self.spec.kv_bytes))
        self._batches: list[queue.SimpleQueue[StepBatch | None]] = [
            queue.SimpleQueue() for _ in range(ranks - 1)
        ]
        self._threads = ThreadPoolExecutor(max_workers=ranks)
        store = HashStore()
        made = [
            self._threads.submit(self._rank, source, kernels(), store, Shard(rank, ranks))
            for rank in range(ranks)
        ]
        self.runners = [each.result(timeout=120) for each in made]
        self._following = [
            self._threads.submit(self._follow, runner, batches)
            for runner, batches in zip(self.runners[1:], self._batches, strict=True)
        ]

    def _rank(
        self, source: ModelSource, kernels: Kernels, store: HashStore, shard: Shard
    ) -> ModelRunner:
        config = source.config()
        weights = load_weights(source, config, torch.float32, False, shard=shard)
        group = RankGroup(store, shard, CPU)
        model = LlamaModel(config, weights, kernels, group=group)
        return ModelRunner(model, KvCache(self.spec, self.memory, rank=shard.rank), others=self)

    @contextmanager
    def step(self, batch: StepBatch) -> Any:
        for batches in self._batches:
            batches.put(batch)
        yield

    @staticmethod
    def _follow(runner: ModelRunner, batches: queue.SimpleQueue[StepBatch | None]) -> None:
        while (batch := batches.get()) is not None:
            runner.follow(batch)

    def close(self) -> None:
        for batches in self._batches:
            batches.put(None)
        for each in self._following:
            each.result(timeout=120)
        self._threads.shutdown()


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_transformers_tokens(
    tmp_path: Path,
    case: str,
    build_model: Callable[..., PreTrainedModel],
    answers_of: Callable[[ModelRunner, int], Any],
    assert_equal: Callable[[PreTrainedModel, Any], None],
) -> None:
    ranks, kind, settings = CASES[case]
    model = build_model(kind, **settings)
    model.save_pretrained(tmp_path)
    together = Ranks(open_source(tmp_path), ranks, TorchKernels)
    answers = answers_of(together.runners[0], STEPS)
    together.close()
    assert_equal(model, answers)


def test_ranks_compute_with_the_native_kernels_too(
    tmp_path: Path,
    build_model: Callable[..., PreTrainedModel],
    answers_of: Callable[[ModelRunner, int], Any],
    assert_equal: Callable[[PreTrainedModel, Any], None],
) -> None:
    model = build_model("Qwen2", **TIED)
    model.save_pretrained(tmp_path)
    library = ensure_built()
    together = Ranks(open_source(tmp_path), 2, lambda: NativeKernels(library, torch.float32))
    answers = answers_of(together.runners[0], STEPS)
    together.close()
    assert_equal(model, answers)


class Recording:
    """A source that notes how many numbers were read."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.path, self.num_tensors = source.path, source.num_tensors
        self.read = 0

    def config(self) -> ModelConfig:
        return self._source.config()

    def tensors(self, config: ModelConfig) -> Any:
        for name, tensor in self._source.tensors(config):
            yield name, _RecordedTensor(self, tensor)


class _RecordedTensor:
    def __init__(self, source: Recording, tensor: Any) -> None:
        self._source, self._tensor = source, tensor
        self.shape = tensor.shape

    def read(self, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        found: torch.Tensor = self._tensor.read(part)
        self._source.read += found.numel()
        return found


def test_a_rank_reads_its_slice_of_the_checkpoint_and_no_more(
    tmp_path: Path, build_model: Callable[..., PreTrainedModel]
) -> None:
    build_model("Llama", **FOUR_OF_EACH).save_pretrained(tmp_path)
    whole, part = Recording(open_source(tmp_path)), Recording(open_source(tmp_path))
    load_weights(whole, whole.config(), torch.float32, False)
    load_weights(part, part.config(), torch.float32, False, shard=Shard(1, 4))
    matrices = 64 * 64 * 4 + 3 * 64 * 96  # of a layer
    norms = 64 * (2 * 2 + 1)
    assert whole.read == 2 * matrices + norms + 2 * 97 * 64
    assert part.read == 2 * matrices // 4 + norms + 2 * 25 * 64
