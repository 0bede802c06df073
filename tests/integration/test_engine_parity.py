"""In float32 one engine's greedy tokens are those of Hugging Face transformers.

The two load the same file by code of their own. Whole clusters are compared, over many prompts at
once, in `test_cluster_answers`.
"""

import asyncio
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.parity_prompts import BLOCK_SIZE, CHUNK_TOKENS, parity_prompts
from bench.reference import Reference
from core.config import EngineConfig
from core.messages import SamplingParams, TransferId
from core.model_card import ModelCard
from engine.batching import StepBudget
from engine.block_manager import BlockManager
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.kv_cache import KvCache
from engine.loader import LoadedModel, kv_spec, load_engine_model
from engine.runner import ModelRunner
from engine.sequence import Sequence, SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch

pytestmark = pytest.mark.timeout(600)

ANSWER_TOKENS = 64
DEADLINE_S = 300.0
FLOAT32 = EngineConfig(dtype="float32", block_size=BLOCK_SIZE)


@dataclass(frozen=True)
class Peer:
    """The engine's and transformers' copies of one model, in float32."""

    engine: LoadedModel
    transformers: Reference


@pytest.fixture(scope="session")
def peer(card: ModelCard, reference: Reference) -> Peer:
    return Peer(load_engine_model(card, FLOAT32), reference)


@pytest.fixture(scope="session")
def prompts(card: ModelCard) -> list[list[int]]:
    return parity_prompts(card.tokenizer_path)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread(threads=2)
    yield thread
    assert asyncio.run(thread.close(timeout_s=30.0))


class Pool:
    """One worker's engine parts, without the worker."""

    def __init__(self, loaded: LoadedModel, compute: ComputeThread, num_blocks: int) -> None:
        one_block = kv_spec(loaded.config, FLOAT32, 2**30).block_bytes
        self.kv = KvCache(kv_spec(loaded.config, FLOAT32, num_blocks * one_block))
        self.blocks = BlockManager(num_blocks)
        self.runner = ModelRunner(loaded.model, self.kv)
        self.compute = compute

    async def run(self, sequences: list[Sequence], *, stagger: int) -> dict[str, list[int]]:
        """Computes the sequences; `stagger` of them join at once and one more at each step."""
        waiting = list(sequences)
        left = {sequence.key for sequence in sequences}
        answers: dict[str, list[int]] = {each.key.transfer.request_id: [] for each in sequences}
        prefill_only = {each.key for each in sequences if each.prefill_only}
        done = asyncio.Event()

        def on_step(events: tuple[SequenceEvent, ...]) -> None:
            for event in events:
                if event.token_id is not None:
                    answers[event.key.transfer.request_id].append(event.token_id)
                    if event.stop_reason is not None or event.key in prefill_only:
                        left.discard(event.key)
            if waiting:
                engine.add(waiting.pop(0))
            if not left:
                done.set()

        def on_error(keys: tuple[SequenceKey, ...], error: Exception) -> None:
            failures.append(error)
            done.set()

        failures: list[Exception] = []
        engine = Engine(
            runner=self.runner,
            compute=self.compute,
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            budget=StepBudget(max_tokens=CHUNK_TOKENS, max_seqs=64),
            eos_token_ids=(),
            on_step=on_step,
            on_error=on_error,
        )
        for _ in range(stagger):
            engine.add(waiting.pop(0))
        loop = asyncio.create_task(engine.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await done.wait()
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        assert not failures
        return answers


def make_sequence(pool: Pool, index: int, prompt: list[int], count: int) -> Sequence:
    lease = pool.blocks.acquire(-(-(len(prompt) + count) // BLOCK_SIZE))
    return Sequence(
        key=SequenceKey(TransferId(request_id=str(index), attempt=0)),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        lease=lease,
        sampling=SamplingParams(temperature=0.0, max_new_tokens=count),
    )


async def answer_all(
    loaded: LoadedModel, compute: ComputeThread, prompts: list[list[int]], *, at_once: int
) -> list[list[int]]:
    """Greedy answers, `at_once` sequences at a time; blocks of earlier ones are used again."""
    answers: list[list[int]] = []
    pool = Pool(loaded, compute, num_blocks=at_once * 20)
    for first in range(0, len(prompts), at_once):
        group = prompts[first : first + at_once]
        pool.blocks = BlockManager(pool.blocks.num_blocks)
        made = [make_sequence(pool, i, prompt, ANSWER_TOKENS) for i, prompt in enumerate(group)]
        texts = await pool.run(made, stagger=min(2, len(made)))
        answers += [texts[str(i)] for i in range(len(group))]
    return answers


@pytest.mark.slow
async def test_generate_of_transformers_writes_the_same_tokens(
    peer: Peer, prompts: list[list[int]], compute: ComputeThread
) -> None:
    chosen = [prompts[0], prompts[-1]]
    answers = await answer_all(peer.engine, compute, chosen, at_once=2)

    assert answers == [peer.transformers.generate(prompt, ANSWER_TOKENS) for prompt in chosen]


async def test_blocks_copied_to_another_pool_continue_the_same_answer(
    peer: Peer, prompts: list[list[int]], compute: ComputeThread
) -> None:
    """What a hand-off does: bytes of blocks move, block ids differ, the first token goes along."""
    prompt = prompts[-1]
    prefill, decode = (Pool(peer.engine, compute, num_blocks=40) for _ in range(2))
    source = make_sequence(prefill, 0, prompt, ANSWER_TOKENS)
    source.prefill_only = True
    first = (await prefill.run([source], stagger=1))["0"]

    decode.blocks.acquire(7)  # so that the ids cannot be the same by chance
    target = make_sequence(decode, 0, prompt, ANSWER_TOKENS)
    used = -(-len(prompt) // BLOCK_SIZE)
    decode.kv.bytes[list(target.block_ids[:used])] = prefill.kv.bytes[list(source.block_ids[:used])]
    target.token_ids += first
    target.num_computed_tokens = len(prompt)
    rest = (await decode.run([target], stagger=1))["0"]

    assert len(first) == 1
    assert peer.transformers.num_wrong(prompt, first + rest) == 0


@pytest.mark.slow
def test_bfloat16_logits_stay_close_to_float32(
    card: ModelCard, peer: Peer, prompts: list[list[int]], record_property: Any
) -> None:
    config = EngineConfig(dtype="bfloat16")
    exact = _last_logits(peer.engine, FLOAT32, prompts)
    rough = _last_logits(load_engine_model(card, config), config, prompts)
    mean = float((exact - rough).abs().mean())
    agree, count = int((exact.argmax(-1) == rough.argmax(-1)).sum()), len(prompts)
    record_property("bf16_mean_absolute_logit_error", mean)
    print(
        f"\nbf16 against float32 over {count} prompts: mean absolute logit error {mean:.4f}, "
        f"same likeliest token {agree}/{count}",
        file=sys.stderr,
    )
    assert 0.0 < mean < 0.25


def _last_logits(
    loaded: LoadedModel, config: EngineConfig, prompts: list[list[int]]
) -> torch.Tensor:
    """Logits after each prompt, all computed in one step. [prompts, vocab]"""
    blocks = 16
    one_block = kv_spec(loaded.config, config, 2**30).block_bytes
    kv = KvCache(kv_spec(loaded.config, config, len(prompts) * blocks * one_block))
    items = tuple(
        BatchItem(
            key=SequenceKey(TransferId(request_id=str(index), attempt=0)),
            start=0,
            token_ids=tuple(prompt),
            block_ids=tuple(range(index * blocks, (index + 1) * blocks)),
            sample=SampleRequest(params=SamplingParams(), position=len(prompt)),
        )
        for index, prompt in enumerate(prompts)
    )
    with torch.inference_mode():
        return ModelRunner(loaded.model, kv).logits(StepBatch(items=items))


def save_tiny_model(folder: Path, *, tied: bool) -> Any:
    """A random Llama of transformers, saved in several shards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=311,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
        model = LlamaForCausalLM(config).eval()
        model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


@pytest.mark.parametrize("tied", [True, False])
async def test_a_sharded_hugging_face_folder_computes_as_transformers(
    tmp_path: Path, compute: ComputeThread, tied: bool
) -> None:
    model = save_tiny_model(tmp_path, tied=tied)
    card = ModelCard(
        folder="",
        source=str(tmp_path),
        name="tiny",
        revision="",
        architecture="LlamaForCausalLM",
        vocab_size=311,
        context_window=512,
        eos_token_ids=(0,),
        bos_token="",
        eos_token="",
    )
    loaded, reference = load_engine_model(card, FLOAT32), Reference(model)
    prompts = [[(i * i * 7 + n) % 311 for i in range(n)] for n in (1, 2, 16, 40, 64, 65, 200)]

    answers = await answer_all(loaded, compute, prompts, at_once=4)

    wrong = [reference.num_wrong(p, a) for p, a in zip(prompts, answers, strict=True)]
    assert wrong == [0] * len(prompts)
