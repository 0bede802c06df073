"""Answers that share a prompt's KV are those that each would be alone, on a real forward pass."""

import asyncio

import pytest
import torch

from core.messages import SamplingParams, TransferId
from engine.batching import StepBudget
from engine.block_manager import BlockManager
from engine.branching import branch
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.runner import ModelRunner
from engine.sequence import Sequence, SequenceKey
from tests.unit.engine.test_paged_model import BLOCK_SIZE, CONFIG, random_weights, text

NUM_BLOCKS = 64
DEADLINE_S = 30.0
SAMPLING = SamplingParams(
    seed=11,
    temperature=1.0,
    top_k=20,
    frequency_penalty=0.3,
    max_new_tokens=12,
    ignore_eos=True,
    logprobs=True,
    top_logprobs=3,
)


async def answers(prompt: list[int], choices: list[int]) -> dict[int, list[SequenceEvent]]:
    """The first choice reads the prompt; the others share its blocks."""
    spec = KvSpec(
        num_blocks=NUM_BLOCKS,
        num_layers=CONFIG.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        dtype=torch.float32,
    )
    kernels = choose_kernels("torch", torch.float32, CONFIG.head_dim)
    blocks = BlockManager(NUM_BLOCKS)
    compute = ComputeThread(threads=1)
    done = asyncio.Event()
    told: dict[int, list[SequenceEvent]] = {choice: [] for choice in choices}
    going: dict[int, Sequence] = {}
    others = choices[1:]

    def stepped(events: tuple[SequenceEvent, ...]) -> None:
        for event in events:
            if event.token_id is None:
                continue
            while others:
                choice = others.pop()
                going[choice] = branch(going[choices[0]], choice, (), BLOCK_SIZE)
                engine.add(going[choice])
            told[event.key.choice].append(event)
            if event.stop_reason is not None:
                going.pop(event.key.choice).lease.release()
        blocks.check()
        if not going:
            done.set()

    engine = Engine(
        runner=ModelRunner(LlamaModel(CONFIG, random_weights(), kernels), KvCache(spec)),
        compute=compute,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        budget=StepBudget(max_tokens=8, max_seqs=8),
        eos_token_ids=(),
        on_step=stepped,
        on_error=lambda keys, error: pytest.fail(repr(error)),
    )
    going[choices[0]] = Sequence(
        key=SequenceKey(TransferId(request_id="r", attempt=1), choices[0]),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        lease=blocks.acquire(-(-(len(prompt) + 1) // BLOCK_SIZE)),
        sampling=SAMPLING,
    )
    engine.add(going[choices[0]])
    loop = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await done.wait()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        assert await compute.close(timeout_s=DEADLINE_S)
    assert blocks.counts().free == NUM_BLOCKS
    return told


@pytest.mark.parametrize("length", [1, 7, 8, 17])
async def test_four_answers_are_four_requests_of_the_same_seed_and_choices(length: int) -> None:
    prompt = text(length)
    together = await answers(prompt, [0, 1, 2, 3])
    tokens = {choice: [each.token_id for each in events] for choice, events in together.items()}
    assert len({tuple(each) for each in tokens.values()}) > 1
    for choice in range(4):
        alone = (await answers(prompt, [choice]))[choice]
        assert tokens[choice] == [each.token_id for each in alone]
        for one, other in zip(together[choice], alone, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
            assert one.logprobs.top_token_ids == other.logprobs.top_token_ids
