"""The step loop of one worker: plan, find blocks, compute, tell what came of it.

The process's event loop owns everything here; the runner's tensors belong to the compute thread,
where `runner.execute` runs one step at a time while the event loop goes on.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from core.block_hash import BlockHasher
from core.errors import Internal, TandemError
from core.messages import StopReason, TokenLogprobs
from engine.batching import (
    BlockBudget,
    ScheduledChunk,
    StepBudget,
    StepPlan,
    num_before,
    plan_step,
)
from engine.block_manager import BlockManager, OutOfBlocks
from engine.grammar import GrammarCompiler, Matcher
from engine.pacing import StepPacer
from engine.sequence import Sequence, SequenceKey
from engine.step_batch import (
    FailedRow,
    SampledToken,
    ScoredPrompt,
    StepBatch,
    StepResult,
    build_batch,
)
from engine.stopping import stop_reason
from engine.turns import ReadingTurns

T = TypeVar("T")


class Runner(Protocol):
    """Computes one step. `engine.runner.ModelRunner` does so with a model."""

    def execute(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None = None
    ) -> StepResult: ...


class Compute(Protocol):
    """Where a step runs. `engine.compute_thread.ComputeThread` is the real one."""

    def submit(self, fn: Callable[..., T], *args: object) -> asyncio.Future[T]: ...


LayerTap = Callable[[StepBatch], Callable[[int], None] | None]


def no_tap(batch: StepBatch) -> None:
    """Nobody wants to know of single layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEvent:
    """What one step did for one sequence."""

    key: SequenceKey
    num_computed_tokens: int
    # None where the step computed a part of the prompt that is not its end.
    token_id: int | None
    # Set with the last token of the sequence, which has left the batch.
    stop_reason: StopReason | None
    # The whole step's time on the compute thread, in seconds.
    compute_s: float
    # Where they were asked for.
    logprobs: TokenLogprobs | None = None
    # More of those of the prompt, from its second token on.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Engine:
    """Sequences in, one call of `on_step` per step out, until `run` is cancelled.

    Their leases grow as they do; where blocks run out, the last to come is preempted. With a
    `hasher` every block that gets full is published to the prefix cache.

    A sequence that ended, or is `prefill_only` and has its first token, leaves by itself. If a step
    raises, `on_error` gets the keys of that step and the exception, those sequences leave and the
    loop lives on. Neither callback may block. One whose sampling has a grammar joins the steps when
    `grammars` has compiled it, and one whose grammar fails leaves by `on_error`, alone.

    `layer_tap` is asked before each step, on the loop; what it gives is called on the compute
    thread after each layer's KV is written, and must not block either.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        compute: Compute,
        blocks: BlockManager,
        block_size: int,
        budget: StepBudget,
        pacer: StepPacer | None = None,
        hasher: BlockHasher | None = None,
        grammars: GrammarCompiler | None = None,
        eos_token_ids: Collection[int],
        on_step: Callable[[tuple[SequenceEvent, ...]], None],
        on_error: Callable[[tuple[SequenceKey, ...], Exception], None],
        layer_tap: LayerTap = no_tap,
    ) -> None:
        self._runner = runner
        self._compute = compute
        self._blocks = blocks
        self._block_size = block_size
        self._budget = budget
        self.pacer = pacer or StepPacer(target_s=None, max_tokens=budget.max_tokens)
        self._hasher = hasher
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_step = on_step
        self._on_error = on_error
        self._layer_tap = layer_tap
        self._turns = ReadingTurns()
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._wake = asyncio.Event()
        self._in_flight: frozenset[SequenceKey] = frozenset()
        # Since when a sequence that is to decode has waited for the next step (monotonic).
        self._waiting_since_s: float | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        # Progress, for the worker's health: steps done, and when the loop last came round or was
        # woken (monotonic).
        self.steps = 0
        self._moved_s = time.monotonic()
        self.preemptions = 0
        # Hears of each step: sequences that decoded, prompt tokens, seconds of compute.
        self.on_measured: Callable[[int, int, float], None] = _nobody_asks
        blocks.on_release(self._freed)

    @property
    def num_running(self) -> int:
        """Sequences of which at least one token has KV."""
        return len(self._sequences) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Sequences of which nothing is computed yet."""
        return sum(1 for each in self._sequences.values() if each.num_computed_tokens == 0)

    @property
    def num_preempted(self) -> int:
        """Sequences that wait for blocks."""
        return sum(1 for each in self._sequences.values() if each.is_preempted)

    @property
    def num_decoding(self) -> int:
        return sum(1 for each in self._sequences.values() if each.is_decoding)

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(
            each.num_missing_tokens for each in self._sequences.values() if not each.is_decoding
        )

    @property
    def stalled_s(self) -> float:
        """For how long the loop has had something to do and has not come round, in seconds."""
        busy = self._wake.is_set() or bool(self._in_flight)
        return time.monotonic() - self._moved_s if busy else 0.0

    def _rouse(self) -> None:
        """There may be something to compute."""
        if not (self._wake.is_set() or self._in_flight):
            self._moved_s = time.monotonic()
        self._wake.set()

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence into the batch. Raises Internal where it cannot be computed.

        One without blocks waits for them as a preempted one does.
        """
        if sequence.key in self._sequences:
            raise Internal(f"{sequence.key} is in the batch already")
        held = len(sequence.block_ids) * self._block_size
        if not sequence.is_preempted and held < len(sequence.token_ids):
            raise Internal(
                f"{sequence.key} has {len(sequence.block_ids)} blocks of {self._block_size} "
                f"for {len(sequence.token_ids)} tokens"
            )
        grammar = sequence.sampling.grammar
        if grammar is not None and self._grammars is None:
            raise Internal(f"{sequence.key} has a grammar, and nothing here compiles it")
        self._sequences[sequence.key] = sequence
        if sequence.is_decoding and self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        self._publish(sequence)
        if grammar is not None and self._grammars is not None and sequence.matcher is None:
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            self._grammars.begin(grammar, answer, partial(self._compiled, sequence))
        self._rouse()

    def _compiled(self, sequence: Sequence, outcome: Matcher | TandemError) -> None:
        """A sequence's grammar is ready, or will never be."""
        if not self._is_current(sequence.key, sequence):
            return
        if isinstance(outcome, TandemError):
            del self._sequences[sequence.key]
            self._on_error((sequence.key,), outcome)
        else:
            sequence.matcher = outcome
            self._rouse()

    async def remove(self, *keys: SequenceKey) -> None:
        """Takes sequences out; idempotent. Nothing more is told of them.

        Returns once no step in flight touches their blocks: it waits for one step at most, and the
        caller's own deadline bounds that.
        """
        for key in keys:
            self._sequences.pop(key, None)
        if not self._in_flight.isdisjoint(keys):
            await self._quiet.wait()

    async def run(self) -> None:
        """Computes steps until cancelled; a step that is under way is waited for."""
        while True:
            await self._wake.wait()
            self._moved_s = time.monotonic()
            plan = self._plan()
            self._find_blocks(plan)
            items = tuple(each for each in plan.items if self._has_room(each))
            if items:
                await self._step(replace(plan, items=items))
            elif plan.is_empty:
                self._wake.clear()
            else:  # blocks changed hands: the next plan sees it, and the loop has a turn before
                await asyncio.sleep(0)

    def _plan(self) -> StepPlan:
        now_s = time.monotonic()
        since_s, self._waiting_since_s = self._waiting_since_s, None
        ready = [each for each in self._sequences.values() if each.is_ready]
        reading = [each for each in ready if not each.is_decoding]
        behind = self._turns.behind((each.cache_salt for each in reading), now_s=now_s)
        prompt_tokens = self.pacer.max_prompt_tokens(
            self.num_decoding,
            num_before=num_before(reading, behind),
            waited_s=now_s - since_s if since_s is not None else 0.0,
        )
        budget = replace(self._budget, max_prompt_tokens=prompt_tokens)
        blocks = BlockBudget(num_available=self._blocks.num_available, block_size=self._block_size)
        return plan_step(ready, budget, blocks, behind=behind)

    def _find_blocks(self, plan: StepPlan) -> None:
        """Moves blocks between the sequences as the plan says; no step is under way."""
        for key in plan.preempted:
            sequence = self._sequences[key]
            sequence.drop_copy()
            sequence.lease.vacate()
            sequence.num_computed_tokens = sequence.num_published_blocks = 0
            sequence.num_preemptions += 1
            self.preemptions += 1
        for key, n in plan.grown:
            # Fewer may have come free than the plan hoped; who gets none waits for the next plan.
            with contextlib.suppress(OutOfBlocks):
                self._sequences[key].lease.take(n)
        for key, n in plan.resumed:
            self._resume(self._sequences[key], n)

    def _resume(self, sequence: Sequence, num_blocks: int) -> None:
        """Gives a preempted sequence blocks, those first that the prefix cache still has.

        What is to be scored has to be computed.
        """
        known = len(sequence.token_ids) - 1
        if sequence.scores_prompt:
            known = sequence.num_scored_tokens
        reusable = known // self._block_size
        sequence.lease.take(num_blocks, sequence.block_hashes[:reusable])
        sequence.num_published_blocks = sequence.lease.num_shared
        sequence.num_computed_tokens = sequence.lease.num_shared * self._block_size

    def _freed(self) -> None:
        """Blocks came free, perhaps between two steps: whoever waits for some has to be planned."""
        if self.num_preempted:
            self._rouse()

    def _has_room(self, chunk: ScheduledChunk) -> bool:
        held = len(self._sequences[chunk.key].block_ids) * self._block_size
        return chunk.start + chunk.num_tokens <= held

    def _publish(self, sequence: Sequence) -> None:
        """Lets others share the blocks that are full by now."""
        if self._hasher is None:
            return
        full = sequence.num_computed_tokens // self._block_size
        if full > len(sequence.block_hashes):
            sequence.block_hashes = self._hasher.chain(
                sequence.token_ids[: full * self._block_size],
                sequence.cache_salt,
                sequence.block_hashes,
            )
        for index in range(sequence.num_published_blocks, full):
            sequence.lease.publish(index, sequence.block_hashes[index])
        sequence.num_published_blocks = max(full, sequence.num_published_blocks)

    async def _step(self, plan: StepPlan) -> None:
        taken = {chunk.key: self._sequences[chunk.key] for chunk in plan.items}
        batch = build_batch(plan, taken, self._eos_token_ids)
        self._in_flight = frozenset(taken)
        self._quiet.clear()
        try:
            on_layer = self._layer_tap(batch)
            result, compute_s = await _settled(self._compute.submit(self._timed, batch, on_layer))
        except Exception as error:
            failed = tuple(key for key, each in taken.items() if self._is_current(key, each))
            for key in failed:
                del self._sequences[key]
            self._on_error(failed, error)
            return
        finally:
            self._in_flight = frozenset()
            self._quiet.set()
        self.steps += 1
        self._learn(plan, taken, compute_s)
        self._drop_failed(taken, result)
        events = self._advance(plan, taken, result, compute_s)
        if events:
            self._on_step(events)

    def _timed(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None
    ) -> tuple[StepResult, float]:
        """Runs on the compute thread."""
        begin = time.perf_counter()
        result = self._runner.execute(batch, on_layer)
        return result, time.perf_counter() - begin

    def _is_current(self, key: SequenceKey, sequence: Sequence) -> bool:
        """False where the sequence was removed during the step, and perhaps another added."""
        return self._sequences.get(key) is sequence

    def _learn(self, plan: StepPlan, taken: dict[SequenceKey, Sequence], compute_s: float) -> None:
        num_decodes = sum(1 for each in taken.values() if each.is_decoding)
        num_prompt_tokens = plan.num_tokens - num_decodes
        read = [chunk for chunk in plan.items if not taken[chunk.key].is_decoding]
        num_pairs = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in read)
        self._turns.observe(
            ((taken[chunk.key].cache_salt, chunk.num_tokens) for chunk in read),
            now_s=time.monotonic(),
        )
        self.pacer.observe(
            num_decodes=num_decodes,
            num_prompt_tokens=num_prompt_tokens,
            compute_s=compute_s,
            num_pairs=num_pairs,
        )
        self.on_measured(num_decodes, num_prompt_tokens, compute_s)

    def _drop_failed(self, taken: dict[SequenceKey, Sequence], result: StepResult) -> None:
        """Sequences that cannot go on leave, each with its own error."""
        for each in result:
            if isinstance(each, FailedRow) and self._is_current(each.key, taken[each.key]):
                del self._sequences[each.key]
                self._on_error((each.key,), each.error)

    def _sample_later(self, sequence: Sequence) -> None:
        """Its mask is late: the last token is computed again once it is there."""
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        if sequence.matcher is not None:
            loop = asyncio.get_running_loop()
            wake = partial(_call_if_running, loop, self._rouse)
            sequence.matcher.when_ready(wake)

    def _advance(
        self,
        plan: StepPlan,
        taken: dict[SequenceKey, Sequence],
        result: StepResult,
        compute_s: float,
    ) -> tuple[SequenceEvent, ...]:
        tokens = {each.key: each for each in result if isinstance(each, SampledToken)}
        scored = {each.key: each.logprobs for each in result if isinstance(each, ScoredPrompt)}
        events = []
        for chunk in plan.items:
            sequence = taken[chunk.key]
            if not self._is_current(chunk.key, sequence):
                continue
            sequence.drop_copy()
            sequence.num_computed_tokens = chunk.start + chunk.num_tokens
            prompt_logprobs = scored.get(chunk.key, ())
            sequence.num_scored_tokens += len(prompt_logprobs)
            token = tokens.get(chunk.key) if chunk.samples else None
            if chunk.samples and token is None:
                self._sample_later(sequence)
            self._publish(sequence)
            reason = None
            if token is not None:
                reason = stop_reason(sequence, token.token_id, self._eos_token_ids)
                sequence.token_ids.append(token.token_id)
                if reason is not None or sequence.prefill_only:
                    del self._sequences[chunk.key]
            events.append(
                SequenceEvent(
                    key=chunk.key,
                    num_computed_tokens=sequence.num_computed_tokens,
                    token_id=token.token_id if token is not None else None,
                    stop_reason=reason,
                    compute_s=compute_s,
                    logprobs=token.logprobs if token is not None else None,
                    prompt_logprobs=prompt_logprobs,
                )
            )
        return tuple(events)


def _nobody_asks(num_decodes: int, num_prompt_tokens: int, compute_s: float) -> None:
    """What a step took is told to nobody."""


def _call_if_running(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From another thread; the loop may have ended by now."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


async def _settled(future: asyncio.Future[T]) -> T:
    """Awaits a step. A cancellation is held back until the step is over: it is using the blocks."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()
