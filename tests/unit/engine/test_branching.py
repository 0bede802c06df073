"""Several answers to one prompt share its blocks, and no token shows it."""

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_hash import BlockHasher
from core.messages import SamplingParams, TransferId
from engine.batching import StepBudget
from engine.block_manager import BlockManager
from engine.branching import branch
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.sequence import Sequence, SequenceKey
from engine.step_batch import SampledToken, StepBatch

BLOCK_SIZE = 4
DEADLINE_S = 20.0
TRANSFER = TransferId(request_id="r", attempt=1)


def next_token(context: tuple[int, ...], choice: int) -> int:
    """A model of which every token depends on all before it, and on the choice."""
    digest = hashlib.blake2b(repr((context, choice)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") + 1


def answer(prompt: list[int], count: int, choice: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens), choice))
    return tokens[len(prompt) :]


class RememberingRunner:
    """Keeps tokens where a model keeps KV: what it answers shows whether the blocks were right."""

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[list[int]] = [[0] * BLOCK_SIZE for _ in range(num_blocks)]
        self.num_computed = 0
        self.num_copies = 0
        self.fails = False

    def execute(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None = None
    ) -> tuple[SampledToken, ...]:
        if self.fails:
            raise ArithmeticError
        for source, target in batch.copies:
            self.num_copies += 1
            self.slots[target] = list(self.slots[source])
        sampled = []
        for item in batch.items:
            end = item.start + len(item.token_ids)
            self.num_computed += len(item.token_ids)
            for position, token_id in zip(range(item.start, end), item.token_ids, strict=True):
                block_id = item.block_ids[position // BLOCK_SIZE]
                self.slots[block_id][position % BLOCK_SIZE] = token_id
            if item.sample is not None:
                context = tuple(
                    self.slots[item.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                    for position in range(end)
                )
                token_id = next_token(context, item.sample.choice)
                sampled.append(SampledToken(key=item.key, token_id=token_id))
        return tuple(sampled)


class World:
    """A request whose first answer reads the prompt, and brings the others with its first token."""

    def __init__(self, num_blocks: int, *, cached: bool = False) -> None:
        self.blocks = BlockManager(num_blocks)
        self.runner = RememberingRunner(num_blocks)
        self.hasher = BlockHasher(b"secret" * 4, BLOCK_SIZE) if cached else None
        self.answers: dict[int, list[int]] = {}
        self.going: dict[int, Sequence] = {}
        self.others: list[tuple[int, list[int]]] = []
        self.error: Exception | None = None
        self.done = asyncio.Event()
        self.on_token: Callable[[int], None] = lambda choice: None

    def _step(self, events: tuple[SequenceEvent, ...]) -> None:
        self.blocks.check()
        for event in events:
            if event.token_id is None:
                continue
            choice = event.key.choice
            if self.others:
                self._branch_out(self.going[choice])
            self.answers[choice].append(event.token_id)
            if event.stop_reason is not None:
                self.drop(choice)
            self.on_token(choice)
        self.blocks.check()

    def _branch_out(self, lead: Sequence) -> None:
        for choice, sent in self.others:
            self.answers[choice] = []
            self.going[choice] = branch(lead, choice, sent, BLOCK_SIZE)
            self.blocks.check()
            self.engine.add(self.going[choice])
        self.others = []

    def drop(self, choice: int) -> None:
        sequence = self.going.pop(choice)
        sequence.drop_copy()
        sequence.lease.release()
        if not self.going:
            self.done.set()

    def _failed(self, keys: tuple[SequenceKey, ...], error: Exception) -> None:
        self.error = error
        for key in keys:
            self.drop(key.choice)

    async def run(
        self, prompt: list[int], count: int, sent: list[list[int]]
    ) -> dict[int, list[int]]:
        """Answers of `count` tokens, of which choice i has `sent[i]` already."""
        compute = ComputeThread(threads=1)
        self.engine = Engine(
            runner=self.runner,
            compute=compute,
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            budget=StepBudget(max_tokens=16, max_seqs=8),
            hasher=self.hasher,
            eos_token_ids=(),
            on_step=self._step,
            on_error=self._failed,
        )
        known = [*prompt, *sent[0]]
        self.answers[0] = []
        self.others = [(i, sent[i]) for i in range(1, len(sent))]
        self.going[0] = Sequence(
            key=SequenceKey(TRANSFER, 0),
            token_ids=known,
            num_prompt_tokens=len(prompt),
            lease=self.blocks.acquire(-(-(len(known) + 1) // BLOCK_SIZE)),
            sampling=SamplingParams(max_new_tokens=count, ignore_eos=True),
        )
        self.engine.add(self.going[0])
        loop = asyncio.create_task(self.engine.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.done.wait()
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            assert await compute.close(timeout_s=DEADLINE_S)
        return self.answers


def prompt_of(length: int) -> list[int]:
    return list(range(1000, 1000 + length))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
async def test_each_choice_gets_its_own_answer_and_the_prompt_is_read_once(length: int) -> None:
    prompt = prompt_of(length)
    world = World(64)
    answers = await world.run(prompt, 6, [[], [], [], []])
    assert answers == {choice: answer(prompt, 6, choice) for choice in range(4)}
    # The last of the prompt's tokens once more for each branch, and no last token of an answer.
    assert world.runner.num_computed == length + 3 + 4 * 5
    assert world.runner.num_copies == 3
    assert world.blocks.counts().free == 64


async def test_full_blocks_of_the_prompt_are_held_once() -> None:
    world = World(64)
    seen = []
    world.on_token = lambda choice: seen.append(world.blocks.counts().owned)
    await world.run(prompt_of(33), 2, [[], [], [], []])
    # 8 full blocks, shared; of the ninth, and what follows in it, each answer has its own.
    assert max(seen) == 8 + 4


@pytest.mark.parametrize("cached", [True, False])
async def test_choices_that_are_taken_up_again_go_on_behind_what_was_sent(cached: bool) -> None:
    prompt = prompt_of(7)
    whole = [answer(prompt, 9, choice) for choice in range(3)]
    sent = [whole[0][:6], whole[1][:2], []]
    answers = await World(64, cached=cached).run(prompt, 9, sent)
    assert [[*sent[i], *answers[i]] for i in range(3)] == whole


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(8, 30),
    length=st.integers(1, 14),
    count=st.integers(1, 14),
    num_choices=st.integers(1, 6),
    cached=st.booleans(),
)
def test_a_small_pool_changes_no_token_and_loses_no_block(
    num_blocks: int, length: int, count: int, num_choices: int, cached: bool
) -> None:
    prompt = prompt_of(length)
    world = World(num_blocks, cached=cached)
    answers = asyncio.run(world.run(prompt, count, [[] for _ in range(num_choices)]))
    assert world.error is None
    assert answers == {choice: answer(prompt, count, choice) for choice in range(num_choices)}
    world.blocks.check()
    counts = world.blocks.counts()
    assert counts.free + counts.cached == num_blocks


async def test_a_choice_that_leaves_before_its_first_step_takes_its_copy_along() -> None:
    world = World(16)

    def leave(choice: int) -> None:
        if 2 in world.going and not world.answers[2]:
            assert world.going[2].copy is not None
            world.engine._sequences.pop(world.going[2].key)  # as `remove` does, between two steps
            world.drop(2)

    world.on_token = leave
    prompt = prompt_of(6)
    answers = await world.run(prompt, 5, [[], [], []])
    assert answers == {0: answer(prompt, 5, 0), 1: answer(prompt, 5, 1), 2: []}
    assert world.runner.num_copies == 1
    assert world.blocks.counts().free == 16


async def test_the_first_answer_may_end_before_the_others_have_begun() -> None:
    """Its blocks are free at once, but for the one that the others have yet to copy."""
    world = World(8)
    prompt = prompt_of(6)
    freed: list[int] = []

    def end_the_lead(choice: int) -> None:
        if choice == 0 and 0 in world.going:
            world.engine._sequences.pop(world.going[0].key)
            world.drop(0)
            freed.append(world.blocks.counts().owned)

    world.on_token = end_the_lead
    answers = await world.run(prompt, 5, [[], []])
    assert answers[1] == answer(prompt, 5, 1)
    assert freed == [1 + 1 + 1]  # shared; the branch's own; the lead's last, until it is copied
    assert world.blocks.counts().free == 8


async def test_a_step_that_fails_gives_every_block_back() -> None:
    world = World(16)

    def fail(choice: int) -> None:
        world.runner.fails = True

    world.on_token = fail
    await world.run(prompt_of(6), 5, [[], [], []])
    assert isinstance(world.error, ArithmeticError)
    assert world.blocks.counts().free == 16


async def test_a_branch_without_room_waits_as_a_preempted_sequence_does() -> None:
    blocks = BlockManager(2)
    lead = Sequence(
        key=SequenceKey(TRANSFER, 0),
        token_ids=[*prompt_of(6), 5],
        num_prompt_tokens=6,
        num_computed_tokens=6,
        lease=blocks.acquire(2),
        sampling=SamplingParams(max_new_tokens=4),
    )
    other = branch(lead, 1, [], BLOCK_SIZE)
    assert other.is_preempted and other.copy is None and other.num_computed_tokens == 0
    blocks.check()
