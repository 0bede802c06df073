"""A split that nobody schedules: what the published comparisons of P:D ratios simulate.

Prompts whole and one at a time, first come, first served, on the prefill worker with the least
queued work; then to the decode worker with the fewest requests, which admits while prompts and
whole answers fit its KV. No message takes time, and nothing else costs anything.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.agenda import Agenda
from bench.sim.job import Job, make_job
from bench.sim.link import Link
from bench.sim.request import Outcome
from bench.sim.timing import Timing
from bench.sim.worker import PromptBudget, SimWorker, Unpaced, WorkerShape
from core.messages import TransferId

# A step's worth of tokens that no prompt exceeds, and of sequences that no load reaches.
_UNBOUNDED = 1 << 20


def unbounded_shape(
    timing: Timing, block_size: int, *, prompts_at_once: int | None = None
) -> WorkerShape:
    """A worker that only its KV bounds."""
    return WorkerShape(
        num_blocks=max(1, timing.kv_tokens // block_size),
        block_size=block_size,
        max_step_tokens=_UNBOUNDED,
        max_seqs=_UNBOUNDED,
        prompts_at_once=prompts_at_once,
    )


@dataclass(slots=True, eq=False)
class _Sent:
    """A request on its way, and when the last of its KV arrives."""

    outcome: Outcome
    queued_s: float = 0.0
    arrives_s: float = 0.0


class StaticSplit:
    """`bench.sim.system.System` with so many prefill and decode workers."""

    def __init__(
        self,
        prefills: int,
        decodes: int,
        timing: Timing,
        agenda: Agenda,
        *,
        block_size: int = 16,
    ) -> None:
        self._timing = timing
        self._agenda = agenda
        self._prefills = [
            _Prefill(f"prefill-{i}", timing, agenda, block_size, self._read)
            for i in range(prefills)
        ]
        self._decodes = [
            ReservingWorker(f"decode-{i}", unbounded_shape(timing, block_size), timing, agenda)
            for i in range(decodes)
        ]

    @property
    def workers(self) -> list[SimWorker]:
        return [*(each.worker for each in self._prefills), *(d.worker for d in self._decodes)]

    def start(self) -> None:
        """Nothing is to be started."""

    def submit(self, outcome: Outcome) -> None:
        least = min(self._prefills, key=lambda each: each.queued_s)
        least.take(outcome)

    def _read(self, prefill: "_Prefill", sent: _Sent) -> None:
        fewest = min(self._decodes, key=lambda each: each.num_requests)
        fewest.num_requests += 1
        now_s, request = self._agenda.now_s, sent.outcome.request
        step_s = self._timing.prefill_s(request.prompt_tokens)
        # A hand-off is alone on its way: it has a link of its own.
        arrives_s = Link(self._timing).push(
            request.prompt_tokens,
            fewest.worker.blocks_for(request.prompt_tokens),
            step_began_s=now_s - step_s,
            step_ended_s=now_s,
        )
        self._agenda.at(arrives_s + self._timing.link_fixed_s, fewest.adopt, sent.outcome)


class _Prefill:
    """A worker that reads whole prompts in the order of their arrival."""

    def __init__(
        self,
        name: str,
        timing: Timing,
        agenda: Agenda,
        block_size: int,
        on_read: Callable[["_Prefill", _Sent], None],
    ) -> None:
        shape = unbounded_shape(timing, block_size, prompts_at_once=1)
        self._timing = timing
        self._on_read = on_read
        self._waiting: collections.deque[_Sent] = collections.deque()
        self.queued_s = 0.0
        pacer = Unpaced(_UNBOUNDED)
        self.worker = SimWorker(name, shape, timing, pacer, agenda, self)

    def take(self, outcome: Outcome) -> None:
        """To the end of the queue."""
        sent = _Sent(outcome, queued_s=self._timing.prefill_s(outcome.request.prompt_tokens))
        self.queued_s += sent.queued_s
        self._waiting.append(sent)
        if not self.worker.num_jobs:
            self._next()

    def _next(self) -> None:
        sent = self._waiting.popleft()
        request = sent.outcome.request
        lease = self.worker.blocks.acquire(self.worker.blocks_for(request.prompt_tokens))
        sent.outcome.read_by = self.worker.name
        self.worker.add(
            make_job(
                TransferId(request_id=str(request.index), attempt=1),
                lease,
                prompt_tokens=request.prompt_tokens,
                known_tokens=request.prompt_tokens,
                computed_tokens=0,
                end_tokens=request.prompt_tokens + 1,
                prefill_only=True,
                tag=sent,
            )
        )

    def chunk_read(self, job: Job, num_tokens: int, began_s: float) -> None:
        """See `worker.Owner`."""

    def token_made(self, job: Job) -> None:
        """See `worker.Owner`."""

    def preemption_turned(self) -> None:
        """Never: prompts have all their blocks."""

    def finished(self, job: Job) -> None:
        """The prompt is read."""
        sent = job.tag
        assert isinstance(sent, _Sent)
        job.sequence.lease.release()
        self.queued_s -= sent.queued_s
        self._on_read(self, sent)
        if self._waiting:
            self._next()


class ReservingWorker:
    """A worker that admits a request once its prompt and its whole answer fit beside the others."""

    def __init__(
        self,
        name: str,
        shape: WorkerShape,
        timing: Timing,
        agenda: Agenda,
        pacer: PromptBudget | None = None,
    ) -> None:
        self._agenda = agenda
        self._waiting: collections.deque[tuple[Outcome, bool]] = collections.deque()
        self.num_requests = 0
        self.worker = SimWorker(
            name,
            shape,
            timing,
            pacer or Unpaced(_UNBOUNDED),
            agenda,
            self,
        )

    def adopt(self, outcome: Outcome) -> None:
        """A request whose prompt was read elsewhere, and whose KV is here."""
        self._waiting.append((outcome, True))
        self._admit()

    def read(self, outcome: Outcome) -> None:
        """A request whose prompt is to be read here."""
        outcome.read_by, outcome.read_locally = self.worker.name, True
        self._waiting.append((outcome, False))
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            outcome, read = self._waiting[0]
            request = outcome.request
            prompt, end = request.prompt_tokens, request.prompt_tokens + request.output_tokens
            needed = self.worker.blocks_for(end)
            if needed > self.worker.blocks.num_available:
                return
            self._waiting.popleft()
            if read:
                outcome.token(self._agenda.now_s)
                if request.output_tokens == 1:
                    self._over(outcome)
                    continue
            self.worker.add(
                make_job(
                    TransferId(request_id=str(request.index), attempt=1),
                    self.worker.blocks.acquire(needed),
                    prompt_tokens=prompt,
                    known_tokens=prompt + read,
                    computed_tokens=prompt if read else 0,
                    end_tokens=end,
                    tag=outcome,
                )
            )

    def chunk_read(self, job: Job, num_tokens: int, began_s: float) -> None:
        """See `worker.Owner`."""

    def token_made(self, job: Job) -> None:
        """See `worker.Owner`."""

    def preemption_turned(self) -> None:
        """Never: requests have all their blocks."""

    def finished(self, job: Job) -> None:
        """The answer is complete."""
        outcome = job.tag
        assert isinstance(outcome, Outcome)
        outcome.tokens(job.times_s, 0.0)
        job.sequence.lease.release()
        self._over(outcome)
        self._admit()

    def _over(self, outcome: Outcome) -> None:
        self.num_requests -= 1
        outcome.finish()
