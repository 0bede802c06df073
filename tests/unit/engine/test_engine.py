"""The step loop: what it tells, what leaves it, and what an error or a removal does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from core.block_hash import BlockHasher
from core.errors import Internal
from core.messages import SamplingParams, StopReason, TransferId
from engine.batching import StepBudget
from engine.block_manager import BlockManager
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.sequence import Sequence, SequenceKey
from engine.step_batch import SampledToken, StepBatch

EOS = 0
BLOCK_SIZE = 4
DEADLINE_S = 10.0


class CountingRunner:
    """The next token is the position it stands at, or EOS at `eos_at`. Keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []
        self.eos_at = -1
        self.before: Callable[[StepBatch], None] = lambda batch: None

    def execute(self, batch: StepBatch, on_layer: object = None) -> tuple[SampledToken, ...]:
        self.batches.append(batch)
        self.before(batch)
        return tuple(
            SampledToken(
                key=item.key,
                token_id=EOS if item.sample.position == self.eos_at else item.sample.position,
            )
            for item in batch.items
            if item.sample is not None
        )


class Desk:
    """Hears what an engine tells and wakes whoever waits for it."""

    def __init__(
        self,
        runner: CountingRunner,
        compute: ComputeThread,
        blocks: BlockManager | None = None,
        hasher: BlockHasher | None = None,
        **budget: int,
    ) -> None:
        self.steps: list[tuple[SequenceEvent, ...]] = []
        self.errors: list[tuple[tuple[SequenceKey, ...], Exception]] = []
        self.changed = asyncio.Condition()
        self.engine = Engine(
            runner=runner,
            compute=compute,
            blocks=blocks or BlockManager(64),
            block_size=BLOCK_SIZE,
            hasher=hasher,
            budget=StepBudget(**{"max_tokens": 8, "max_seqs": 4} | budget),
            eos_token_ids=[EOS],
            on_step=lambda events: self._told(self.steps, events),
            on_error=lambda keys, error: self._told(self.errors, (keys, error)),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def _told(self, where: list[Any], what: Any) -> None:
        where.append(what)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(condition)

    def of(self, key: SequenceKey) -> list[SequenceEvent]:
        return [event for step in self.steps for event in step if event.key == key]

    def ended(self, key: SequenceKey) -> bool:
        return any(event.stop_reason is not None for event in self.of(key))


@asynccontextmanager
async def running(runner: CountingRunner, **options: Any) -> AsyncIterator[Desk]:
    compute = ComputeThread(threads=1)
    desk = Desk(runner, compute, **options)
    loop = asyncio.create_task(desk.engine.run())
    try:
        yield desk
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        assert await compute.close(timeout_s=DEADLINE_S)


def sequence(name: str, prompt: int = 3, new: int = 4, **fields: Any) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new, **fields.pop("sampling", {}))
    values = {
        "key": SequenceKey(TransferId(request_id=name, attempt=0)),
        "token_ids": [7] * prompt,
        "num_prompt_tokens": prompt,
        "lease": BlockManager(64).acquire(-(-(prompt + new) // BLOCK_SIZE)),
        "sampling": sampling,
    }
    return Sequence(**values | fields)


async def test_a_request_is_computed_in_chunks_and_then_token_by_token() -> None:
    async with running(CountingRunner(), max_tokens=4) as desk:
        asked = sequence("a", prompt=10, new=3)
        desk.engine.add(asked)
        await desk.until(lambda: desk.ended(asked.key))

        told = [(e.num_computed_tokens, e.token_id, e.stop_reason) for e in desk.of(asked.key)]
        assert told == [
            (4, None, None),
            (8, None, None),
            (10, 10, None),
            (11, 11, None),
            (12, 12, StopReason.LENGTH),
        ]
        assert desk.engine.steps == 5
        assert desk.engine.num_running == desk.engine.num_waiting == 0


async def test_a_loop_whose_step_never_ends_is_seen_to_stand_still_and_an_idle_one_is_not() -> None:
    runner, begun, go_on = CountingRunner(), threading.Event(), threading.Event()

    def hang(batch: StepBatch) -> None:
        begun.set()
        go_on.wait(DEADLINE_S)

    runner.before = hang
    async with running(runner) as desk:
        assert desk.engine.stalled_s == 0
        asked = sequence("a", prompt=3, new=1)
        desk.engine.add(asked)
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        first_s = desk.engine.stalled_s
        await asyncio.sleep(0)
        assert desk.engine.stalled_s > first_s > 0
        go_on.set()
        await desk.until(lambda: desk.ended(asked.key))
        assert desk.engine.stalled_s == 0


async def test_each_step_is_told_with_what_it_held() -> None:
    async with running(CountingRunner()) as desk:
        measured: list[tuple[int, int, float]] = []
        desk.engine.on_measured = lambda *step: measured.append(step)
        asked = sequence("a", prompt=3, new=3)
        desk.engine.add(asked)
        await desk.until(lambda: desk.ended(asked.key))
        assert [step[:2] for step in measured] == [(0, 3), (1, 0), (1, 0)]
        assert all(seconds > 0 for *_, seconds in measured)


async def test_one_call_tells_a_step_of_all_sequences() -> None:
    async with running(CountingRunner()) as desk:
        asked = [sequence(name, new=2) for name in "ab"]
        for each in asked:
            desk.engine.add(each)
        await desk.until(lambda: all(desk.ended(each.key) for each in asked))
        assert [len(step) for step in desk.steps] == [2, 2]
        assert {event.compute_s for event in desk.steps[0]} == {desk.steps[0][0].compute_s}


async def test_eos_ends_a_sequence_and_the_others_go_on() -> None:
    runner = CountingRunner()
    runner.eos_at = 4
    async with running(runner) as desk:
        short, long = sequence("short"), sequence("long", sampling={"ignore_eos": True})
        desk.engine.add(short)
        desk.engine.add(long)
        await desk.until(lambda: desk.ended(long.key))
        assert desk.of(short.key)[-1].stop_reason is StopReason.EOS
        assert len(desk.of(short.key)) == 2
        assert [event.token_id for event in desk.of(long.key)] == [3, EOS, 5, 6]


async def test_a_prefill_only_sequence_leaves_after_its_first_token() -> None:
    async with running(CountingRunner()) as desk:
        asked = sequence("p", prefill_only=True, lease=BlockManager(1).acquire(1))
        other = sequence("q", new=3)
        desk.engine.add(asked)
        desk.engine.add(other)
        await desk.until(lambda: desk.ended(other.key))
        assert [(e.token_id, e.stop_reason) for e in desk.of(asked.key)] == [(3, None)]
        assert asked.token_ids == [7, 7, 7, 3]


async def test_an_adopted_sequence_goes_on_from_its_first_token() -> None:
    runner = CountingRunner()
    async with running(runner) as desk:
        asked = sequence("d", token_ids=[7, 7, 7, 5], num_computed_tokens=3)
        desk.engine.add(asked)
        await desk.until(lambda: desk.ended(asked.key))
        assert [event.token_id for event in desk.of(asked.key)] == [4, 5, 6]
        first = runner.batches[0].items[0]
        assert (first.start, first.token_ids) == (3, (5,))


async def test_histories_travel_only_for_the_penalties_that_read_them() -> None:
    runner = CountingRunner()
    async with running(runner, max_tokens=16) as desk:
        asked = [
            sequence("none"),
            sequence("presence", sampling={"presence_penalty": 1.0}),
            sequence("repetition", sampling={"repetition_penalty": 2.0}),
        ]
        for each in asked:
            desk.engine.add(each)
        await desk.until(lambda: all(desk.ended(each.key) for each in asked))
        samples = [item.sample for item in runner.batches[-2].items if item.sample]
    histories = [(each.prompt_token_ids, each.generated_token_ids) for each in samples]
    assert histories == [((), ()), ((), (3, 4)), ((7, 7, 7), (3, 4))]


async def test_a_failed_step_reports_its_sequences_and_the_loop_lives_on() -> None:
    runner = CountingRunner()

    def fail(batch: StepBatch) -> None:
        if any(item.key.transfer.request_id == "bad" for item in batch.items):
            raise ArithmeticError("no such number")

    runner.before = fail
    async with running(runner) as desk:
        bad, good = sequence("bad"), sequence("good")
        desk.engine.add(bad)
        await desk.until(lambda: bool(desk.errors))
        keys, error = desk.errors[0]
        assert keys == (bad.key,)
        assert isinstance(error, ArithmeticError)
        desk.engine.add(good)
        await desk.until(lambda: desk.ended(good.key))
        assert not desk.of(bad.key)


async def test_remove_waits_for_the_step_that_uses_the_blocks() -> None:
    runner = CountingRunner()
    entered, leave = threading.Event(), threading.Event()

    def hold(batch: StepBatch) -> None:
        entered.set()
        assert leave.wait(DEADLINE_S)

    runner.before = hold
    async with running(runner) as desk:
        asked, other = sequence("a"), sequence("b")
        desk.engine.add(asked)
        desk.engine.add(other)
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        removal = asyncio.create_task(desk.engine.remove(asked.key))
        done, _ = await asyncio.wait({removal}, timeout=0.05)
        assert not done
        leave.set()
        async with asyncio.timeout(DEADLINE_S):
            await removal
            await desk.engine.remove(asked.key)
        await desk.until(lambda: desk.ended(other.key))
        assert not desk.of(asked.key)


async def test_removing_a_sequence_that_is_in_no_step_returns_at_once() -> None:
    compute = ComputeThread(threads=1)
    desk = Desk(CountingRunner(), compute)
    asked = sequence("a")
    desk.engine.add(asked)
    assert desk.engine.num_waiting == 1
    async with asyncio.timeout(DEADLINE_S):
        await desk.engine.remove(asked.key)
        await desk.engine.remove(asked.key)
    assert desk.engine.num_waiting == 0
    assert await compute.close()


async def test_cancelling_the_loop_waits_for_the_step_under_way() -> None:
    runner = CountingRunner()
    entered, leave = threading.Event(), threading.Event()

    def hold(batch: StepBatch) -> None:
        entered.set()
        assert leave.wait(DEADLINE_S)

    runner.before = hold
    compute = ComputeThread(threads=1)
    desk = Desk(runner, compute)
    loop = asyncio.create_task(desk.engine.run())
    desk.engine.add(sequence("a"))
    assert await asyncio.to_thread(entered.wait, DEADLINE_S)
    loop.cancel()
    done, _ = await asyncio.wait({loop}, timeout=0.05)
    assert not done
    leave.set()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(asyncio.CancelledError):
            await loop
    assert await compute.close()


async def test_a_sequence_that_cannot_be_computed_is_refused() -> None:
    compute = ComputeThread(threads=1)
    desk = Desk(CountingRunner(), compute)
    desk.engine.add(sequence("a"))
    with pytest.raises(Internal, match="already"):
        desk.engine.add(sequence("a"))
    with pytest.raises(Internal, match="blocks"):
        desk.engine.add(sequence("b", prompt=9, lease=BlockManager(2).acquire(2)))
    assert await compute.close()


async def test_what_would_end_an_answer_is_banned_from_its_first_tokens() -> None:
    runner = CountingRunner()
    async with running(runner, max_tokens=16) as desk:
        stops = {"min_tokens": 2, "stop_token_ids": (9,)}
        plain = sequence("plain", new=4, sampling=stops)
        past_eos = sequence("past", new=4, sampling=stops | {"ignore_eos": True})
        for each in (plain, past_eos):
            desk.engine.add(each)
        await desk.until(lambda: all(desk.ended(each.key) for each in (plain, past_eos)))
        banned: dict[SequenceKey, list[tuple[int, ...]]] = {plain.key: [], past_eos.key: []}
        for batch in runner.batches:
            for item in batch.items:
                assert item.sample is not None
                banned[item.key].append(item.sample.banned_token_ids)
        assert banned[plain.key] == [(9, EOS), (9, EOS), (), ()]
        assert banned[past_eos.key] == [(9,), (9,), (), ()]
