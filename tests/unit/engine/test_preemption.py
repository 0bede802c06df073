"""Blocks run out: who gives way, what it costs, and that no token changes."""

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_hash import BlockHasher
from core.messages import SamplingParams, TokenLogprobs, TransferId
from engine.batching import BlockBudget, StepBudget, plan_step
from engine.block_manager import BlockManager
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.sequence import MAX_PREEMPTIONS, Sequence, SequenceKey
from engine.step_batch import BatchItem, SampledToken, ScoredPrompt, StepBatch, StepResult

BLOCK_SIZE = 4
DEADLINE_S = 20.0
BUDGET = StepBudget(max_tokens=16, max_seqs=8)


def next_token(context: tuple[int, ...]) -> int:
    """A model of which every token depends on all before it."""
    digest = hashlib.blake2b(repr(context).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") + 1


def score(context: tuple[int, ...], token_id: int) -> TokenLogprobs:
    """Of a token behind its context."""
    return TokenLogprobs(logprob=-float(next_token((*context, -token_id))))


class RememberingRunner:
    """Keeps tokens where a model keeps KV: what it answers shows whether the blocks were right."""

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[list[int]] = [[0] * BLOCK_SIZE for _ in range(num_blocks)]
        self.num_computed = 0

    def execute(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        sampled: list[SampledToken | ScoredPrompt] = []
        for item in batch.items:
            end = item.start + len(item.token_ids)
            self.num_computed += len(item.token_ids)
            for position, token_id in zip(range(item.start, end), item.token_ids, strict=True):
                block_id = item.block_ids[position // BLOCK_SIZE]
                self.slots[block_id][position % BLOCK_SIZE] = token_id
            if (asked := item.score) is not None:
                first = item.start + asked.first
                behind = range(first, first + len(asked.token_ids))
                told = tuple(
                    score(self._context(item, at), token_id)
                    for at, token_id in zip(behind, asked.token_ids, strict=True)
                )
                sampled.append(ScoredPrompt(key=item.key, logprobs=told))
            if item.sample is not None:
                token_id = next_token(self._context(item, end - 1))
                sampled.append(SampledToken(key=item.key, token_id=token_id))
        return tuple(sampled)

    def _context(self, item: BatchItem, last: int) -> tuple[int, ...]:
        return tuple(
            self.slots[item.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            for position in range(last + 1)
        )


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


class World:
    """An engine over a small pool, whose owner leases a prompt's blocks as a worker does."""

    def __init__(self, num_blocks: int, *, cached: bool, scored: bool = False) -> None:
        self.blocks = BlockManager(num_blocks)
        self.scored = scored
        self.scores: dict[SequenceKey, list[float]] = {}
        self.runner = RememberingRunner(num_blocks)
        self.hasher = BlockHasher(b"secret" * 4, BLOCK_SIZE) if cached else None
        self.answers: dict[SequenceKey, list[int]] = {}
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.waiting: list[tuple[list[int], int]] = []
        self.done = asyncio.Event()

    def _step(self, events: tuple[SequenceEvent, ...]) -> None:
        self.blocks.check()
        for event in events:
            told = self.scores.setdefault(event.key, [])
            told += [each.logprob for each in event.prompt_logprobs]
            if event.token_id is not None:
                self.answers[event.key].append(event.token_id)
            if event.stop_reason is not None:
                self.sequences[event.key].lease.release()
                del self.sequences[event.key]
        self._admit()

    def _admit(self) -> None:
        while self.waiting and not self.engine.num_preempted:
            prompt, count = self.waiting[0]
            needed = -(-(len(prompt) + 1) // BLOCK_SIZE)
            if needed > self.blocks.num_available:
                break
            self.waiting.pop(0)
            hashes = self.hasher.chain(prompt[:-1]) if self.hasher else ()
            lease = self.blocks.acquire(needed, () if self.scored else hashes)
            key = SequenceKey(TransferId(request_id=str(len(self.answers)), attempt=1))
            self.answers[key] = []
            self.sequences[key] = Sequence(
                key=key,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                num_computed_tokens=lease.num_shared * BLOCK_SIZE,
                lease=lease,
                sampling=SamplingParams(
                    max_new_tokens=count, ignore_eos=True, prompt_logprobs=self.scored
                ),
                block_hashes=hashes,
                num_published_blocks=lease.num_shared,
            )
            self.engine.add(self.sequences[key])
        if not self.waiting and not self.sequences:
            self.done.set()

    def _failed(self, keys: tuple[SequenceKey, ...], error: Exception) -> None:
        self.error = error
        self.done.set()

    async def run(self, asks: list[tuple[list[int], int]]) -> list[list[int]]:
        self.error: Exception | None = None
        self.waiting = list(asks)
        compute = ComputeThread(threads=1)
        self.engine = Engine(
            runner=self.runner,
            compute=compute,
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            budget=BUDGET,
            hasher=self.hasher,
            eos_token_ids=(),
            on_step=self._step,
            on_error=self._failed,
        )
        self._admit()
        loop = asyncio.create_task(self.engine.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.done.wait()
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            await compute.close()
        if self.error is not None:
            raise self.error
        return list(self.answers.values())


@pytest.mark.parametrize("cached", [False, True])
async def test_answers_that_outgrow_the_pool_are_preempted_and_do_not_change(cached: bool) -> None:
    asks = [([n, n + 1, n + 2], 20) for n in range(6)]
    world = World(num_blocks=8, cached=cached)

    assert await world.run(asks) == [answer(*ask) for ask in asks]
    assert world.engine.preemptions > 0
    assert world.blocks.num_available == 8


async def test_a_prompt_computes_only_what_the_cache_lacks() -> None:
    prompt = list(range(100, 118))
    world = World(num_blocks=32, cached=True)
    assert await world.run([(prompt, 4)]) == [answer(prompt, 4)]
    before = world.runner.num_computed
    longer = [*prompt, 7, 8, 9]
    world.done.clear()
    world.answers.clear()
    assert await world.run([(longer, 1)]) == [answer(longer, 1)]
    assert world.runner.num_computed - before == len(longer) - 16
    world.blocks.check()


prompts = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=14), st.integers(1, 16)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(8, 20), st.booleans())
def test_any_load_ends_with_the_right_tokens_and_an_unchanged_pool(
    asks: list[tuple[list[int], int]], num_blocks: int, cached: bool
) -> None:
    world = World(num_blocks, cached=cached)
    assert asyncio.run(world.run(asks)) == [answer(*ask) for ask in asks]
    world.blocks.check()
    assert world.blocks.num_available == num_blocks


def scores(prompt: list[int]) -> list[float]:
    behind = range(1, len(prompt))
    return [score(tuple(prompt[:at]), prompt[at]).logprob for at in behind]


@settings(max_examples=40, deadline=None)
@given(prompts, st.integers(8, 20), st.booleans())
def test_each_prompt_token_is_scored_once_whatever_is_preempted_or_cached(
    asks: list[tuple[list[int], int]], num_blocks: int, cached: bool
) -> None:
    world = World(num_blocks, cached=cached, scored=True)
    assert asyncio.run(world.run(asks)) == [answer(*ask) for ask in asks]
    assert list(world.scores.values()) == [scores(prompt) for prompt, _ in asks]


async def test_a_prompt_that_is_preempted_half_read_is_scored_to_its_end() -> None:
    """The budget of a step reads it in pieces, and those before it grow meanwhile."""
    asks = [([n, n + 1, n + 2], 24) for n in range(3)] + [(list(range(50, 72)), 2)]
    world = World(num_blocks=12, cached=True, scored=True)
    assert await world.run(asks) == [answer(*ask) for ask in asks]
    assert sorted(world.scores.values()) == sorted(scores(prompt) for prompt, _ in asks)
    assert world.engine.preemptions > 0


def sequence(name: str, blocks: BlockManager, tokens: int, **fields: int) -> Sequence:
    return Sequence(
        key=SequenceKey(TransferId(request_id=name, attempt=1)),
        token_ids=[1] * tokens,
        num_prompt_tokens=1,
        num_computed_tokens=tokens - 1,
        lease=blocks.acquire(-(-(tokens - 1) // BLOCK_SIZE)),
        sampling=SamplingParams(max_new_tokens=30),
        **fields,
    )


def plan(blocks: BlockManager, *sequences: Sequence):  # type: ignore[no-untyped-def]
    budget = BlockBudget(num_available=blocks.num_available, block_size=BLOCK_SIZE)
    return plan_step(sequences, BUDGET, budget)


def test_the_last_to_come_gives_way() -> None:
    blocks = BlockManager(4)
    old, mid, new = (sequence(name, blocks, 5) for name in ("old", "mid", "new"))
    made = plan(blocks, old, mid, new)
    assert made.preempted == (new.key,)
    assert made.grown == ((old.key, 1), (mid.key, 1))
    assert [item.key for item in made.items] == [old.key, mid.key]


def test_who_gave_way_often_enough_is_left_alone_and_comes_back_with_all_its_blocks() -> None:
    blocks = BlockManager(12)
    old = sequence("old", blocks, 5)
    spent = sequence("spent", blocks, 6, num_preemptions=MAX_PREEMPTIONS)
    blocks.acquire(blocks.num_available)
    made = plan(blocks, old, spent)
    assert made.preempted == (old.key,)
    assert [item.key for item in made.items] == [spent.key]

    blocks = BlockManager(12)
    spent = sequence("spent", blocks, 6, num_preemptions=MAX_PREEMPTIONS)
    spent.lease.vacate()
    assert plan(blocks, spent).resumed == ((spent.key, 8),)


def test_a_preempted_sequence_waits_until_others_can_go_on_beside_it() -> None:
    blocks = BlockManager(6)
    runs, waits = sequence("runs", blocks, 6), sequence("waits", blocks, 10)
    waits.lease.vacate()
    waits.num_computed_tokens = 0
    blocker = blocks.acquire(blocks.num_available - 3)
    assert plan(blocks, runs, waits).resumed == ()
    blocker.release()
    assert plan(blocks, runs, waits).resumed == ((waits.key, 3),)
