"""A simulated worker that serves either role; see `deploy.elastic`.

Both sides serve all the time, over one step loop and one KV pool: a role only says what is newly
placed. A real one has a loop for each side, which take turns on one thread; here what both have
shares steps for the moment in which both have something.
"""

from dataclasses import replace

from bench.sim.job import Job
from bench.sim.members import (
    DecodeMember,
    Member,
    PrefillMember,
    Surroundings,
    warm_up,
)
from core.messages import Counter, WorkerHello, WorkerLoad, WorkerRole
from engine.pacing import StepPacer


class RolePacer:
    """`worker.PromptBudget`: a prefill worker's pace while nothing decodes on one, else the other.

    So each learns from steps of its own kind.
    """

    def __init__(self, reading: StepPacer, decoding: StepPacer) -> None:
        self._reading = reading
        self._decoding = decoding
        self.role = WorkerRole.DECODE

    def _of(self, num_decodes: int) -> StepPacer:
        reads = self.role is WorkerRole.PREFILL and not num_decodes
        return self._reading if reads else self._decoding

    def max_prompt_tokens(
        self, num_decodes: int, *, num_before: int = 0, waited_s: float = 0.0
    ) -> int:
        """Of the next step."""
        pacer = self._of(num_decodes)
        return pacer.max_prompt_tokens(num_decodes, num_before=num_before, waited_s=waited_s)

    def observe(
        self,
        *,
        num_decodes: int,
        num_prompt_tokens: int,
        compute_s: float,
        num_pairs: float = 0.0,
    ) -> None:
        """One step is over."""
        self._of(num_decodes).observe(
            num_decodes=num_decodes,
            num_prompt_tokens=num_prompt_tokens,
            compute_s=compute_s,
            num_pairs=num_pairs,
        )


class ElasticMember(Member):
    """Owns the worker; its two sides own what is placed on them."""

    def __init__(self, name: str, life: int, around: Surroundings, role: WorkerRole) -> None:
        pacer = StepPacer(
            target_s=around.shape.itl_target_s or None, max_tokens=around.shape.decode_step_tokens
        )
        super().__init__(name, life, around, pacer)
        self._reader = PrefillMember(name, life, around, self.worker)
        self._decoder = DecodeMember(name, life, around, self.worker)
        for side in (self._reader, self._decoder):
            side.whole = self
        self._pace = RolePacer(self._reader.pacer, self._decoder.pacer)
        self.worker.pacer = self._pace
        for own in (self._reader.pacer, self._decoder.pacer):
            warm_up(own, around.timing)
        self.role = self._pace.role = role
        self._decoder.draining = role is WorkerRole.PREFILL

    @property
    def reader(self) -> PrefillMember | None:
        return self._reader

    @property
    def decoder(self) -> DecodeMember | None:
        return self._decoder

    @property
    def reads_prompts(self) -> bool:
        return self.role is WorkerRole.DECODE and self._decoder.reads_prompts

    def hello(self) -> WorkerHello:
        """What it registers with, at first and when it turns."""
        return replace(super().hello(), elastic=True)

    def load(self) -> WorkerLoad:
        """Costs and speeds of the present role, the rest of both."""
        own, other = self._own, self._other
        self.pacer, self.attempts = own.pacer, {**own.attempts, **other.attempts}
        return replace(super().load(), turning=bool(other.attempts))

    def counters(self) -> tuple[Counter, ...]:
        return self._reader.counters()

    def begin_turn(self, role: WorkerRole) -> None:
        """From now on it says that it serves this role."""
        self.role = self._pace.role = role
        self._decoder.draining = role is WorkerRole.PREFILL

    def end_turn(self) -> None:
        """The scheduler knows: answers go to those who decode."""
        if self.role is WorkerRole.PREFILL:
            self._decoder.hand_over()
            self.around.urgent(self)

    def chunk_read(self, job: Job, num_tokens: int, began_s: float) -> None:
        self._side(job).chunk_read(job, num_tokens, began_s)

    def token_made(self, job: Job) -> None:
        self._side(job).token_made(job)

    def finished(self, job: Job) -> None:
        self._side(job).finished(job)

    def _side(self, job: Job) -> Member:
        return self._reader if job.sequence.prefill_only else self._decoder

    @property
    def _own(self) -> Member:
        return self._reader if self.role is WorkerRole.PREFILL else self._decoder

    @property
    def _other(self) -> Member:
        return self._decoder if self.role is WorkerRole.PREFILL else self._reader
