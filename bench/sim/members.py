"""Simulated workers of this code: one that reads prompts for others, one that decodes.

They follow `prefill_worker.desk` and `decode_worker.desk`: leases, what is read where, when blocks
come free again. What they say to each other over streams is a call here, as late as a message.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.agenda import Agenda
from bench.sim.job import Job, make_job
from bench.sim.link import Link
from bench.sim.request import Outcome
from bench.sim.shape import ClusterShape
from bench.sim.timing import Timing
from bench.sim.worker import SimWorker
from core.block_hash import short
from core.messages import (
    CacheNews,
    Compatibility,
    Counter,
    Endpoint,
    TransferId,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from engine.block_manager import BlockLease, OutOfBlocks
from engine.pacing import StepPacer

_WARM_UP_TOKENS = 64
_WARM_UP_DECODES = (1, 4)


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a request. `known_tokens`: the prompt, and what the client has of the
    answer."""

    outcome: Outcome
    transfer: TransferId
    known_tokens: int
    decode: "DecodeMember"
    prefill: "PrefillMember | None"
    lease: BlockLease | None = None
    # The prefill worker's own, until the decode worker has adopted.
    source: BlockLease | None = None
    arrives_s: float = 0.0
    began: bool = False
    over: bool = False
    # Of the blocks that another worker may hold, where they are others than the request's prefix.
    moved_hashes: tuple[bytes, ...] = ()

    @property
    def end_tokens(self) -> int:
        return self.outcome.request.prompt_tokens + self.outcome.request.output_tokens

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Of the full blocks of the tokens but the last, which must be computed."""
        return self.moved_hashes or self.outcome.request.prefix


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What all members share."""

    agenda: Agenda
    timing: Timing
    shape: ClusterShape
    # An attempt has its first token; has ended; failed with an error's code; is to go on elsewhere.
    first_token: Callable[[Attempt], None]
    ended: Callable[[Attempt], None]
    failed: Callable[[Attempt, str], None]
    moved: Callable[[Attempt], None]
    # A worker's load changed in a way that is told at once.
    urgent: Callable[["Member"], None]


class Member:
    """A worker and its name."""

    role = WorkerRole.UNSPECIFIED

    def __init__(
        self,
        name: str,
        life: int,
        around: Surroundings,
        pacer: StepPacer,
        worker: SimWorker | None = None,
    ) -> None:
        """With `worker` it is one side of a member that owns that."""
        self.name = name
        self.life = life
        self.ref = WorkerRef(name=name, incarnation=str(life))
        self.endpoint = Endpoint(worker=self.ref, address=name)
        self.around = around
        self.pacer = pacer
        self.attempts: dict[TransferId, Attempt] = {}
        # Whose load the scheduler is told.
        self.whole: Member = self
        if worker is not None:
            self.worker = worker
            return
        warm_up(pacer, around.timing)
        prefill = self.role is WorkerRole.PREFILL
        shape = around.shape.worker(around.timing, prefill=prefill)
        self.worker = SimWorker(name, shape, around.timing, pacer, around.agenda, self)

    @property
    def reader(self) -> "PrefillMember | None":
        """What reads prompts for others here."""
        return None

    @property
    def decoder(self) -> "DecodeMember | None":
        """What decodes here."""
        return None

    def hello(self) -> WorkerHello:
        """What it registers with."""
        timing, shape = self.around.timing, self.worker.shape
        return WorkerHello(
            endpoint=self.endpoint,
            role=self.role,
            compatibility=Compatibility(
                model="simulated",
                revision="",
                dtype="",
                block_size=shape.block_size,
                block_bytes=shape.block_size * timing.kv_token_bytes,
                layout="",
                protocol=1,
            ),
            num_blocks=shape.num_blocks,
            max_seqs=shape.max_seqs,
            max_step_tokens=shape.max_step_tokens,
            local_prefill=self.reads_prompts,
        )

    @property
    def reads_prompts(self) -> bool:
        """Whether it is a decode worker that reads prompts itself."""
        return False

    def load(self) -> WorkerLoad:
        """What the scheduler is told."""
        worker = self.worker
        num_decodes = worker.num_decoding if self.role is WorkerRole.DECODE else 0
        return WorkerLoad(
            blocks=worker.counts(),
            num_running=worker.num_jobs - worker.num_waiting,
            num_waiting=len(self.attempts) - worker.num_jobs + worker.num_waiting,
            num_preempted=worker.num_preempted,
            backlog_tokens=worker.backlog_tokens,
            prefill_tokens_per_s=self.pacer.prompt_tokens_per_s(num_decodes),
            step_s=self.pacer.step_s,
            cost=self.pacer.cost.cost(),
            counters=self.counters(),
        )

    def cache_news(self, *, whole: bool = False) -> CacheNews | None:
        """What its prefix cache holds, or has gained and lost since it was last told."""
        gained, lost = (self.worker.blocks.published(), ()) if whole else self.worker.blocks.news()
        if not (gained or lost):
            return None
        return CacheNews(published=tuple(map(short, gained)), evicted=tuple(map(short, lost)))

    def counters(self) -> tuple[Counter, ...]:
        """Of its transport."""
        return ()

    def chunk_read(self, job: Job, num_tokens: int, began_s: float) -> None:
        """See `worker.Owner`."""

    def token_made(self, job: Job) -> None:
        """See `worker.Owner`."""

    def finished(self, job: Job) -> None:
        """See `worker.Owner`."""

    def preemption_turned(self) -> None:
        """The scheduler is told at once: nothing is placed here until all run again."""
        self.around.urgent(self.whole)


class PrefillMember(Member):
    """Reads prompts and pushes their KV while it computes on."""

    role = WorkerRole.PREFILL

    def __init__(
        self, name: str, life: int, around: Surroundings, worker: SimWorker | None = None
    ) -> None:
        pacer = StepPacer(target_s=None, max_tokens=around.shape.prefill_step_tokens)
        super().__init__(name, life, around, pacer, worker)
        self.links: dict[WorkerRef, Link] = {}

    @property
    def reader(self) -> "PrefillMember | None":
        return self

    def counters(self) -> tuple[Counter, ...]:
        links = self.links.values()
        return (
            Counter(name="sim_bytes_sent", value=sum(link.num_bytes for link in links)),
            Counter(name="sim_busy_us", value=round(1e6 * sum(link.busy_s for link in links))),
        )

    def prefill(self, attempt: Attempt) -> None:
        """A decode worker asks for a prompt's KV."""
        if not self.worker.alive or attempt.over:
            return
        known = attempt.known_tokens
        hashes = attempt.hashes[: (known - 1) // self.worker.shape.block_size]
        try:
            lease = self.worker.blocks.acquire(self.worker.blocks_for(known), hashes)
        except OutOfBlocks:
            later_s = self.around.timing.control_s
            self.around.agenda.after(later_s, attempt.decode.refused, attempt)
            return
        attempt.source = lease
        self.attempts[attempt.transfer] = attempt
        cached = lease.num_shared * self.worker.shape.block_size
        attempt.outcome.cached_tokens = cached
        if cached:
            self._push(attempt, cached, began_s=self.around.agenda.now_s)
        self.worker.add(
            make_job(
                attempt.transfer,
                lease,
                prompt_tokens=attempt.outcome.request.prompt_tokens,
                tenant=attempt.outcome.request.tenant,
                known_tokens=known,
                computed_tokens=cached,
                end_tokens=known + 1,
                prefill_only=True,
                hashes=hashes,
                num_published=lease.num_shared,
                tag=attempt,
            )
        )

    def chunk_read(self, job: Job, num_tokens: int, began_s: float) -> None:
        """Its KV leaves, layer by layer."""
        self._push(_attempt(job), num_tokens, began_s=began_s)

    def _push(self, attempt: Attempt, num_tokens: int, *, began_s: float) -> None:
        link = self.links.get(attempt.decode.ref)
        if link is None:
            link = self.links[attempt.decode.ref] = Link(self.around.timing)
        attempt.arrives_s = link.push(
            num_tokens,
            self.worker.blocks_for(num_tokens),
            step_began_s=began_s,
            step_ended_s=self.around.agenda.now_s,
        )

    def finished(self, job: Job) -> None:
        """The commit record follows the last byte."""
        attempt = _attempt(job)
        timing = self.around.timing
        commits_s = attempt.arrives_s + timing.link_fixed_s + timing.control_s
        self.around.agenda.at(commits_s, attempt.decode.adopt, attempt)

    def release(self, attempt: Attempt) -> None:
        """The decode worker has adopted, or given up."""
        self.attempts.pop(attempt.transfer, None)
        if attempt.source is not None and self.worker.alive:
            attempt.source.release()
        attempt.source = None

    def give_up(self, attempt: Attempt) -> None:
        """The decode worker is gone: nothing more is computed of it."""
        for job in list(self.worker.jobs):
            if job.tag is attempt:
                self.worker.remove(job.key)
        self.release(attempt)


class DecodeMember(Member):
    """Has prompts read, or reads them itself beside what it decodes."""

    role = WorkerRole.DECODE

    def __init__(
        self, name: str, life: int, around: Surroundings, worker: SimWorker | None = None
    ) -> None:
        shape = around.shape
        pacer = StepPacer(target_s=shape.itl_target_s or None, max_tokens=shape.decode_step_tokens)
        super().__init__(name, life, around, pacer, worker)
        # It takes no requests.
        self.draining = False

    @property
    def decoder(self) -> "DecodeMember | None":
        return self

    @property
    def reads_prompts(self) -> bool:
        return self.around.shape.local_prefill != "never"

    def start(self, attempt: Attempt) -> None:
        """A gateway brings a request."""
        around, worker = self.around, self.worker
        if not worker.alive:
            return
        if self.draining:
            around.moved(attempt)
            return
        known = attempt.known_tokens
        hashes = attempt.hashes[: (known - 1) // worker.shape.block_size]
        try:
            if worker.num_preempted:
                raise OutOfBlocks("requests that came earlier wait for KV blocks")
            lease = worker.blocks.acquire(worker.blocks_for(known + 1), hashes)
        except OutOfBlocks:
            around.urgent(self.whole)
            around.failed(attempt, "overloaded")
            return
        attempt.lease = lease
        self.attempts[attempt.transfer] = attempt
        cached = lease.num_shared * worker.shape.block_size
        one_step = self.pacer.max_prompt_tokens(worker.num_decoding)
        is_sooner = self.reads_prompts and known - cached + worker.backlog_tokens <= one_step
        if attempt.prefill is None or is_sooner:
            attempt.prefill = None
            attempt.outcome.read_by, attempt.outcome.read_locally = self.name, True
            attempt.outcome.cached_tokens = cached
            worker.add(
                make_job(
                    attempt.transfer,
                    lease,
                    prompt_tokens=attempt.outcome.request.prompt_tokens,
                    tenant=attempt.outcome.request.tenant,
                    known_tokens=known,
                    computed_tokens=cached,
                    end_tokens=attempt.end_tokens,
                    hashes=hashes,
                    num_published=lease.num_shared,
                    tag=attempt,
                )
            )
            return
        attempt.outcome.read_by, attempt.outcome.read_locally = attempt.prefill.name, False
        lease.to_transfer()
        around.agenda.after(around.timing.control_s, attempt.prefill.prefill, attempt)

    def refused(self, attempt: Attempt) -> None:
        """The prefill worker had no room after all."""
        if not attempt.over and self.worker.alive:
            self._free(attempt)
            self.around.failed(attempt, "overloaded")

    def hand_over(self) -> None:
        """Gives every request up, as it turns: each goes on elsewhere.

        The blocks of answers stay in the prefix cache, from which those who go on take them.
        """
        jobs = {job.tag: job for job in self.worker.jobs}
        for attempt in list(self.attempts.values()):
            job = jobs.get(attempt)
            if job is not None:
                self.worker.remove(job.key)
                self.flush(job)
                if attempt.began and not job.sequence.is_preempted:
                    full = job.sequence.num_computed_tokens // self.worker.shape.block_size
                    attempt.moved_hashes = _own_hashes(attempt, full)
                    job.sequence.block_hashes = attempt.moved_hashes
                    self.worker.publish(job)
            elif attempt.prefill is not None:
                self.around.agenda.after(
                    self.around.timing.control_s, attempt.prefill.give_up, attempt
                )
            self._free(attempt)
            self.around.moved(attempt)

    def let_go(self, attempt: Attempt) -> None:
        """The prefill worker died before it had sent everything."""
        self._free(attempt)

    def adopt(self, attempt: Attempt) -> None:
        """All of a prompt's KV is here, and its first token."""
        around = self.around
        if attempt.prefill is not None:
            around.agenda.after(around.timing.control_s, attempt.prefill.release, attempt)
        if attempt.over or attempt.lease is None or not self.worker.alive:
            return
        attempt.lease.to_owned()
        attempt.began = True
        attempt.outcome.token(around.agenda.now_s + self._to_client_s)
        around.first_token(attempt)
        known = attempt.known_tokens
        if known + 1 >= attempt.end_tokens:
            self._free(attempt)
            around.ended(attempt)
            return
        hashes = attempt.hashes[: known // self.worker.shape.block_size]
        job = make_job(
            attempt.transfer,
            attempt.lease,
            prompt_tokens=attempt.outcome.request.prompt_tokens,
            tenant=attempt.outcome.request.tenant,
            known_tokens=known + 1,
            computed_tokens=known,
            end_tokens=attempt.end_tokens,
            hashes=hashes,
            num_published=attempt.lease.num_shared,
            tag=attempt,
        )
        self.worker.publish(job)
        self.worker.add(job)

    @property
    def _to_client_s(self) -> float:
        timing = self.around.timing
        return timing.control_s + timing.front_s

    def token_made(self, job: Job) -> None:
        """Of a prompt that was read here; once more where it was preempted and read again."""
        attempt = _attempt(job)
        if not attempt.began:
            attempt.began = True
            self.flush(job)
            self.around.first_token(attempt)

    def finished(self, job: Job) -> None:
        attempt = _attempt(job)
        self.flush(job)
        attempt.outcome.num_preemptions += job.sequence.num_preemptions
        self._free(attempt)
        self.around.ended(attempt)

    def flush(self, job: Job) -> None:
        """The client gets what was made until now."""
        _attempt(job).outcome.tokens(job.times_s, self._to_client_s)
        job.times_s = []

    def _free(self, attempt: Attempt) -> None:
        self.attempts.pop(attempt.transfer, None)
        if attempt.lease is not None:
            attempt.lease.release()
            attempt.lease = None


def _attempt(job: Job) -> Attempt:
    assert isinstance(job.tag, Attempt)
    return job.tag


def _own_hashes(attempt: Attempt, num_blocks: int) -> tuple[bytes, ...]:
    """Of an answer's full blocks: behind the prefix that others may share, no other request's."""
    request = attempt.outcome.request
    prefix = request.prefix[:num_blocks]
    mine = b"\xff" + request.index.to_bytes(4, "big")  # no trace's ids are as large
    own = (mine + block.to_bytes(3, "big") for block in range(num_blocks))
    return prefix + tuple(own)[len(prefix) :]


def warm_up(pacer: StepPacer, timing: Timing) -> None:
    """What a worker measures before it registers; see `engine.warmup`."""
    prompt_s = timing.prefill_base_s + timing.prompt_s(0, _WARM_UP_TOKENS, whole=True)
    pacer.observe(num_decodes=0, num_prompt_tokens=_WARM_UP_TOKENS, compute_s=prompt_s)
    for num_seqs in _WARM_UP_DECODES:
        compute_s = timing.decode_s(num_seqs, num_seqs * _WARM_UP_TOKENS)
        pacer.observe(num_decodes=num_seqs, num_prompt_tokens=0, compute_s=compute_s)
