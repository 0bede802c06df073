"""One worker in virtual time: the engine's planner, pacer and block manager over a timing model.

Follows `engine.engine.Engine` step by step. While all sequences have their blocks, those that
decode are one batch of which only sums are kept, and `plan_step` is asked for the prompts beside
them alone: its answer is the same as for all (a test compares). Where blocks run short, or more
sequences decode than a step takes, it is asked for every sequence.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.sim.agenda import Agenda
from bench.sim.decode_batch import DecodeBatch
from bench.sim.job import Job
from bench.sim.timing import Timing
from core.messages import BlockCounts
from engine.batching import (
    BlockBudget,
    ScheduledChunk,
    StepBudget,
    StepPlan,
    num_before,
    plan_step,
)
from engine.block_manager import BlockManager, OutOfBlocks
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceKey
from engine.turns import ReadingTurns

_NO_CHUNKS: tuple[ScheduledChunk, ...] = ()


class PromptBudget(Protocol):
    """How many prompt tokens a step takes. `engine.pacing.StepPacer` is one."""

    def max_prompt_tokens(
        self, num_decodes: int, *, num_before: int = 0, waited_s: float = 0.0
    ) -> int: ...

    def observe(
        self,
        *,
        num_decodes: int,
        num_prompt_tokens: int,
        compute_s: float,
        num_pairs: float = 0.0,
    ) -> None: ...


class Unpaced:
    """A step takes up to so many prompt tokens, whatever decodes beside them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def max_prompt_tokens(
        self, num_decodes: int, *, num_before: int = 0, waited_s: float = 0.0
    ) -> int:
        """Of the next step."""
        return self._max_tokens

    def observe(
        self,
        *,
        num_decodes: int,
        num_prompt_tokens: int,
        compute_s: float,
        num_pairs: float = 0.0,
    ) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """`prompts_at_once` prompts share a step at most; None: as many as fit."""

    num_blocks: int
    block_size: int
    max_step_tokens: int
    max_seqs: int
    prompts_at_once: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """A step, for those who watch."""

    began_s: float
    compute_s: float
    num_decodes: int
    context_tokens: int
    chunks: tuple[ScheduledChunk, ...]


class Owner(Protocol):
    """Whom a worker tells what its steps did."""

    def chunk_read(self, job: Job, num_tokens: int, began_s: float) -> None:
        """A part of a prompt, before its end if that is the last one."""

    def token_made(self, job: Job) -> None:
        """The one that a prompt's last chunk gives. `Job.times_s` has it."""

    def finished(self, job: Job) -> None:
        """It has all its tokens, and has left."""

    def preemption_turned(self) -> None:
        """The first sequence lost its blocks, or the last one of those has some again."""


class SimWorker:
    """`busy_s` and the counts since the start are for those who look."""

    def __init__(
        self,
        name: str,
        shape: WorkerShape,
        timing: Timing,
        pacer: PromptBudget,
        agenda: Agenda,
        owner: Owner,
    ) -> None:
        self.name = name
        self.shape = shape
        self.blocks = BlockManager(shape.num_blocks)
        self.pacer = pacer
        self.alive = True
        self.busy_s = 0.0
        self.steps = self.preemptions = self.prompt_tokens = self.decode_tokens = 0
        self.least_available = shape.num_blocks
        self.step_s = 0.0
        # Workers on the same machine.
        self.neighbours: Sequence[SimWorker] = ()
        self.watch: Callable[[StepTaken], None] | None = None
        self._turns = ReadingTurns()
        self._timing = timing
        self._agenda = agenda
        self._owner = owner
        self._jobs: dict[SequenceKey, Job] = {}
        self._batch = DecodeBatch(shape.block_size)
        self._reading: dict[SequenceKey, Job] = {}
        self._joining: list[Job] = []
        self.num_preempted = 0
        self.computing = False
        # Since when a sequence that is to decode has waited for the next step.
        self._waiting_since_s: float | None = None

    # --- what others ask -----------------------------------------------------------------------

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Sequences of which nothing is computed yet."""
        return sum(1 for job in self._reading.values() if job.sequence.num_computed_tokens == 0)

    @property
    def num_decoding(self) -> int:
        joining = sum(1 for job in self._joining if job.sequence.is_decoding)
        return len(self._batch) + joining

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        waiting = [*self._reading.values(), *self._joining]
        return sum(
            job.sequence.num_missing_tokens for job in waiting if not job.sequence.is_decoding
        )

    @property
    def jobs(self) -> Iterable[Job]:
        """All of them, in the order of their arrival."""
        return self._jobs.values()

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.shape.block_size)

    def counts(self) -> BlockCounts:
        """The pool by state."""
        return self.blocks.counts()

    # --- what others tell ----------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Takes a job into the steps. It has blocks for the tokens that it has."""
        self._jobs[job.key] = job
        self._joining.append(job)
        if job.sequence.is_decoding and self._waiting_since_s is None:
            self._waiting_since_s = self._agenda.now_s
        if not self.computing:
            self._begin()

    def remove(self, key: SequenceKey) -> None:
        """Nothing more is computed of it; a step in flight tells nobody of it."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        self._reading.pop(key, None)
        if job in self._joining:
            self._joining.remove(job)
        elif job.joined_step >= 0:
            self._batch.leave(job)
        self.num_preempted -= job.sequence.is_preempted

    def die(self) -> list[Job]:
        """The process is gone, and its jobs with it: gives those, up to date."""
        self.alive = False
        self._batch.dissolve()
        lost = list(self._jobs.values())
        self._jobs = {}
        self._reading = {}
        self._joining = []
        return lost

    # --- steps ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The next step, or none where nothing can be computed."""
        while self._jobs and self.alive:
            if self._take_in() and self._grow():
                chunks = self._chunks()
                if not (chunks or len(self._batch)):
                    return
                self._start(chunks, ())
                return
            plan = self._full_plan()
            if plan.items:
                self._start((), plan.items)
                return
            if plan.is_empty:
                return

    def _take_in(self) -> bool:
        """New ones go to their places. False where the batch cannot hold what decodes."""
        if self.num_preempted:
            return False
        for job in self._joining:
            self._settle(job)
        self._joining = []
        return len(self._batch) <= min(self.shape.max_seqs, self.shape.max_step_tokens)

    def _settle(self, job: Job) -> None:
        if job.sequence.is_decoding:
            self._batch.join(job)
        else:
            self._reading[job.key] = job

    def _grow(self) -> bool:
        """Blocks for all whose next token needs one; false where there are not enough."""
        growing = self._batch.growing()
        if not growing:
            return True
        if len(growing) > self.blocks.num_available:
            self._batch.postpone(growing)
            return False
        for job in growing:
            job.sequence.lease.take(1)
            self._batch.grown(job)
        return True

    def _chunks(self) -> tuple[ScheduledChunk, ...]:
        """Of prompts, what `plan_step` has for them beside the batch."""
        num_decodes = len(self._batch)
        max_seqs = self.shape.max_seqs - num_decodes
        max_tokens = self.shape.max_step_tokens - num_decodes
        if not self._reading or max_seqs < 1 or max_tokens < 1:
            return _NO_CHUNKS
        readers = [job.sequence for job in self._reading.values()]
        behind = self._behind(readers)
        budget = StepBudget(
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_prompt_tokens=self._max_prompt_tokens(num_decodes, readers, behind),
        )
        return plan_step(readers[: self.shape.prompts_at_once], budget, behind=behind).items

    def _behind(self, readers: Iterable[EngineSequence]) -> frozenset[str]:
        """Tenants that step back."""
        return self._turns.behind((each.cache_salt for each in readers), now_s=self._agenda.now_s)

    def _max_prompt_tokens(
        self, num_decodes: int, readers: Iterable[EngineSequence], behind: frozenset[str]
    ) -> int:
        since_s = self._waiting_since_s
        return self.pacer.max_prompt_tokens(
            num_decodes,
            num_before=num_before(readers, behind),
            waited_s=self._agenda.now_s - since_s if since_s is not None else 0.0,
        )

    def _full_plan(self) -> StepPlan:
        """As the engine plans: over every sequence. Moves blocks as the plan says."""
        self._batch.dissolve()
        jobs = list(self._jobs.values())
        self._joining = jobs
        self._reading = {}
        sequences = [job.sequence for job in jobs]
        readers = [each for each in sequences if not each.is_decoding]
        behind = self._behind(readers)
        budget = StepBudget(
            max_tokens=self.shape.max_step_tokens,
            max_seqs=self.shape.max_seqs,
            max_prompt_tokens=self._max_prompt_tokens(
                len(sequences) - len(readers), readers, behind
            ),
        )
        available = self.blocks.num_available
        pool = BlockBudget(num_available=available, block_size=self.shape.block_size)
        plan = plan_step(sequences, budget, pool, behind=behind)
        self._find_blocks(plan)
        items = tuple(each for each in plan.items if self._has_room(each))
        return StepPlan(items=items, preempted=plan.preempted, resumed=plan.resumed)

    def _find_blocks(self, plan: StepPlan) -> None:
        for key in plan.preempted:
            sequence = self._jobs[key].sequence
            sequence.lease.vacate()
            sequence.num_computed_tokens = sequence.num_published_blocks = 0
            sequence.num_preemptions += 1
            self.preemptions += 1
        for key, count in plan.grown:
            with contextlib.suppress(OutOfBlocks):
                self._jobs[key].sequence.lease.take(count)
        for key, count in plan.resumed:
            sequence = self._jobs[key].sequence
            reusable = (len(sequence.token_ids) - 1) // self.shape.block_size
            sequence.lease.take(count, sequence.block_hashes[:reusable])
            sequence.num_published_blocks = sequence.lease.num_shared
            sequence.num_computed_tokens = sequence.lease.num_shared * self.shape.block_size
        had_preempted = self.num_preempted > 0
        self.num_preempted += len(plan.preempted) - len(plan.resumed)
        if had_preempted != (self.num_preempted > 0):
            self._owner.preemption_turned()

    def _has_room(self, chunk: ScheduledChunk) -> bool:
        held = len(self._jobs[chunk.key].sequence.block_ids) * self.shape.block_size
        return chunk.start + chunk.num_tokens <= held

    def _start(self, chunks: tuple[ScheduledChunk, ...], items: tuple[ScheduledChunk, ...]) -> None:
        """A step of the batch and these chunks, or of the single `items` of a full plan."""
        num_decodes, context_tokens = len(self._batch), self._batch.context_tokens
        if items:
            decoding = [i for i in items if self._jobs[i.key].sequence.is_decoding]
            num_decodes = len(decoding)
            context_tokens = sum(chunk.start + 1 for chunk in decoding)
            chunks = tuple(i for i in items if not self._jobs[i.key].sequence.is_decoding)
        compute_s = self._compute_s(chunks, num_decodes, context_tokens)
        self.computing = True
        self._waiting_since_s = None
        self.busy_s += compute_s
        self.decode_tokens += num_decodes
        self.least_available = min(self.least_available, self.blocks.num_available)
        now_s = self._agenda.now_s
        if self.watch is not None:
            self.watch(
                StepTaken(
                    began_s=now_s,
                    compute_s=compute_s,
                    num_decodes=num_decodes,
                    context_tokens=context_tokens,
                    chunks=chunks,
                )
            )
        taken = {item.key: self._jobs[item.key] for item in items or chunks}
        self._agenda.at(
            now_s + compute_s, self._end, items or chunks, taken, num_decodes, now_s, bool(items)
        )

    def _compute_s(
        self, chunks: tuple[ScheduledChunk, ...], num_decodes: int, context_tokens: int
    ) -> float:
        timing = self._timing
        if not chunks:
            compute_s = timing.decode_s(num_decodes, context_tokens)
        else:
            alone = num_decodes == 0
            prompts_s = sum(
                timing.prompt_s(c.start, c.num_tokens, whole=alone and c.start == 0 and c.samples)
                for c in chunks
            )
            if alone:
                compute_s = timing.prefill_base_s + prompts_s
            else:
                compute_s = timing.mixed_s(prompts_s, num_decodes, context_tokens)
        if timing.neighbour_slowdown and self.neighbours:
            busy = sum(1 for each in self.neighbours if each.computing and each is not self)
            compute_s *= 1 + timing.neighbour_slowdown * busy
        return compute_s

    def _end(
        self,
        items: tuple[ScheduledChunk, ...],
        taken: dict[SequenceKey, Job],
        num_decodes: int,
        began_s: float,
        single: bool,
    ) -> None:
        if not self.alive:
            return
        now_s = self._agenda.now_s
        self.computing = True
        self.steps += 1
        self.step_s = now_s - began_s
        over = [] if single else self._batch.advance(now_s)
        num_prompt_tokens = sum(item.num_tokens for item in items)
        if single:
            num_prompt_tokens -= num_decodes
        self.prompt_tokens += num_prompt_tokens
        read = [c for c in items if not taken[c.key].sequence.is_decoding]
        self.pacer.observe(
            num_decodes=num_decodes,
            num_prompt_tokens=num_prompt_tokens,
            compute_s=self.step_s,
            num_pairs=sum(c.num_tokens * (c.start + c.num_tokens / 2) for c in read),
        )
        self._turns.observe(
            ((taken[c.key].sequence.cache_salt, c.num_tokens) for c in read), now_s=now_s
        )
        for item in items:
            job = taken[item.key]
            if self._jobs.get(item.key) is job:
                self._advance(job, item, began_s, now_s)
        for job in over:
            del self._jobs[job.key]
            self._owner.finished(job)
        self.computing = False
        self._begin()

    def _advance(self, job: Job, chunk: ScheduledChunk, began_s: float, now_s: float) -> None:
        """One sequence that a plan named."""
        sequence = job.sequence
        was_decoding = sequence.is_decoding
        sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        self.publish(job)
        if chunk.samples:
            job.tokens.number += 1
            job.times_s.append(now_s)
            self._reading.pop(job.key, None)
            if job.is_over or sequence.prefill_only:
                del self._jobs[job.key]
                if job in self._joining:
                    self._joining.remove(job)
            elif job not in self._joining:
                self._joining.append(job)
        if not was_decoding:
            self._owner.chunk_read(job, chunk.num_tokens, began_s)
            if chunk.samples:
                self._owner.token_made(job)
        if chunk.samples and (job.is_over or sequence.prefill_only):
            self._owner.finished(job)

    def publish(self, job: Job) -> None:
        """Lets others share the blocks of its prompt that are full by now."""
        sequence = job.sequence
        full = min(
            sequence.num_computed_tokens // self.shape.block_size, len(sequence.block_hashes)
        )
        for index in range(sequence.num_published_blocks, full):
            sequence.lease.publish(index, sequence.block_hashes[index])
        sequence.num_published_blocks = max(full, sequence.num_published_blocks)
