"""The KV cache in FP8 with the default model: how far logits are off, and that workers agree."""

from dataclasses import replace

import pytest
import torch

from bench.parity_prompts import PROSE, TEXTS
from bench.streams import generate
from core.config import EngineConfig
from core.messages import SamplingParams, TransferId
from engine.kv_cache import KvCache
from engine.loader import kv_spec, load_engine_model
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
ANSWER = 24
TIMEOUT_S = 300.0
EXACT = EngineConfig(dtype="float32", kernels="torch")
FP8 = EngineConfig(dtype="float32", kernels="torch", kv_cache_dtype="fp8_e4m3")


@pytest.fixture(scope="module")
def prompts(encode) -> list[list[int]]:
    return [*map(encode, TEXTS), encode(PROSE)]


def last_logits(card, config: EngineConfig, prompts: list[list[int]]) -> torch.Tensor:
    """Of each prompt's last token, [prompts, vocabulary]: read in chunks of 32."""
    loaded = load_engine_model(card, config)
    spec = replace(kv_spec(loaded.config, config), num_blocks=64)
    runner = ModelRunner(loaded.model, KvCache(spec))
    rows = []
    for tokens in prompts:
        for start in range(0, len(tokens), 32):
            end = min(start + 32, len(tokens))
            item = BatchItem(
                key=SequenceKey(TransferId(request_id="r", attempt=0)),
                start=start,
                token_ids=tuple(tokens[start:end]),
                block_ids=tuple(range(-(-len(tokens) // config.block_size))),
                sample=SampleRequest(params=SamplingParams(), position=end),
            )
            with torch.inference_mode():
                made = runner.logits(StepBatch(items=(item,)))
        rows.append(made[0].float().clone())
    return torch.stack(rows)


def test_logits_are_near_those_of_kv_in_float32(card, prompts):
    exact = last_logits(card, EXACT, prompts)
    error = (last_logits(card, FP8, prompts) - exact).abs().mean()
    print(f"logits: mean absolute error {error:.4f}, standard deviation {exact.std():.4f}")
    assert error < 0.1 * exact.std()


def answers(start_cluster, prompts, *, prefill: int, ranks: int = 1) -> list[list[int]]:
    cluster = start_cluster(
        settings={
            "prefill_workers": prefill,
            "scheduler": {"local_prefill": "never" if prefill else "auto"},
            "engine": {
                "dtype": "float32",
                "kernels": "native",  # whose bits for a token are the same in every batch
                "kv_cache_dtype": "fp8_e4m3",
                "max_step_tokens": 64,
                "prefill_tensor_parallel": ranks,
            },
            "transfer": {"accept_timeout_s": 30.0, "arrive_timeout_s": 60.0},
        }
    )
    asked = [generate(MODEL, p, max_tokens=ANSWER, ignore_eos=True) for p in prompts]
    with cluster.client() as client:
        streams = client.answer_all(asked, timeout_s=TIMEOUT_S)
    assert [stream.details for stream in streams] == [""] * len(prompts)
    assert cluster.stop(timeout_s=120) == 0
    return [stream.token_ids for stream in streams]


def test_tokens_are_the_same_whether_kv_was_handed_over_or_not(start_cluster, prompts):
    alone = answers(start_cluster, prompts, prefill=0)
    assert answers(start_cluster, prompts, prefill=1) == alone


def test_heads_of_several_ranks_are_handed_to_one(start_cluster, prompts):
    one = answers(start_cluster, prompts[:4], prefill=1)
    assert answers(start_cluster, prompts[:4], prefill=1, ranks=3) == one
