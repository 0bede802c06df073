"""A cluster of this code in virtual time: gateway, scheduler and workers.

The gateway's part is `gateway.session`'s: it asks for a placement, brings it to the decode worker,
and tries again where a worker was lost or had no room.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.agenda import Agenda
from bench.sim.elastic_member import ElasticMember
from bench.sim.event_log import EventLog
from bench.sim.members import Attempt, DecodeMember, Member, PrefillMember, Surroundings
from bench.sim.request import Outcome
from bench.sim.shape import ClusterShape
from bench.sim.timing import Timing
from bench.sim.virtual_desk import MODEL, VirtualDesk
from bench.sim.worker import SimWorker
from core.block_hash import short
from core.config import SchedulerConfig
from core.messages import (
    Enqueue,
    Placement,
    PlacementMessage,
    Prefilled,
    Rejection,
    Settle,
    TransferId,
    Turn,
    WorkerRef,
    WorkerRole,
)

_MAX_RETRIES = 2
_MAX_REFUSALS = 5
_MOVED_PAUSE_S = 0.05
_REFUSED_PAUSE_S = 0.1
# Of a prompt's block hashes, so many are told to the scheduler.
_HASHES_TOLD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's process dies at a time, and another life of it is there later; None: never."""

    worker: str
    at_s: float
    back_after_s: float | None = None


@dataclass(slots=True, eq=False)
class _Session:
    """One request, across its attempts."""

    outcome: Outcome
    attempt: Attempt | None = None
    retries: int = 0
    refusals: int = 0
    lost: tuple[str, ...] = ()

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Of the blocks that a worker may hold."""
        return self.attempt.hashes if self.attempt is not None else self.outcome.request.prefix


class Tandem:
    """`bench.sim.system.System`: this code's own cluster."""

    def __init__(
        self,
        shape: ClusterShape,
        timing: Timing,
        agenda: Agenda,
        *,
        deaths: Sequence[Death] = (),
        log: EventLog | None = None,
    ) -> None:
        self.shape = shape.checked(timing)
        self._timing = timing
        self._agenda = agenda
        self._deaths = deaths
        self._around = Surroundings(
            agenda=agenda,
            timing=timing,
            shape=shape,
            first_token=self._first_token,
            ended=self._ended,
            failed=self._failed,
            moved=self._moved,
            urgent=self._report,
        )
        self.members: dict[str, Member] = {}
        self._past: list[SimWorker] = []
        self._desk = VirtualDesk(
            scheduler_config(shape),
            agenda,
            delay_s=timing.control_s,
            answer=self._answered,
            command=self._commanded,
            step_target_s=shape.itl_target_s,
            log=log,
        )
        self._sessions: dict[str, _Session] = {}
        self.num_placements: collections.Counter[str] = collections.Counter()
        self.num_turns = 0
        for index in range(shape.prefill_workers):
            self._make(f"prefill-{index}", 0)
        for index in range(shape.decode_workers):
            self._make(f"decode-{index}", 0)

    @property
    def workers(self) -> list[SimWorker]:
        return [*self._past, *(member.worker for member in self.members.values())]

    @property
    def num_sessions(self) -> int:
        """Requests that are not over."""
        return len(self._sessions)

    def start(self) -> None:
        """Everybody says hello."""
        self._desk.start()
        for number, member in enumerate(self.members.values(), 1):
            # Workers report in turns, as processes that start at different times do.
            self._join(member, number / len(self.members))
        for death in self._deaths:
            self._agenda.at(death.at_s, self._die, death)

    def submit(self, outcome: Outcome) -> None:
        session = _Session(outcome)
        self._sessions[str(outcome.request.index)] = session
        self._agenda.after(self._timing.front_s, self._enqueue, session)

    # --- the gateway's part --------------------------------------------------------------------

    def _enqueue(self, session: _Session) -> None:
        outcome = session.outcome
        request = outcome.request
        remaining_s = request.arrival_s + self.shape.timeout_s - self._agenda.now_s
        if remaining_s <= 0:
            self._over(session, "deadline_exceeded")
            return
        outcome.num_attempts += 1
        known = outcome.num_tokens
        enqueue = Enqueue(
            transfer=TransferId(request_id=str(request.index), attempt=outcome.num_attempts),
            model=MODEL,
            prompt_tokens=request.prompt_tokens + known,
            max_new_tokens=max(1, self.shape.max_new_tokens - known),
            remaining_s=remaining_s,
            excluded_workers=session.lost,
            tenant=request.tenant,
            block_hashes=tuple(map(short, session.hashes[:_HASHES_TOLD])),
        )
        self._desk.say(enqueue)

    def _answered(self, message: PlacementMessage) -> None:
        match message:
            case Placement():
                self._placed(message)
            case Rejection(transfer=transfer, failure=failure):
                self._over(self._sessions[transfer.request_id], failure.code)

    def _placed(self, placement: Placement) -> None:
        session = self._sessions[placement.transfer.request_id]
        on_decode = self.members.get(placement.decode.worker.name)
        on_prefill = None
        if placement.prefill is not None:
            on_prefill = self.members.get(placement.prefill.worker.name)
        gone = [
            ref
            for ref, member in ((placement.decode, on_decode), (placement.prefill, on_prefill))
            if ref is not None and (member is None or member.ref != ref.worker)
        ]
        self.num_placements["local" if placement.prefill is None else "disaggregated"] += 1
        if gone:
            self._desk.say(Settle(transfer=placement.transfer))
            self._lost(session, str(gone[0].worker))
            return
        decode = on_decode.decoder if on_decode is not None else None
        prefill = on_prefill.reader if on_prefill is not None else None
        assert decode is not None
        request = session.outcome.request
        attempt = Attempt(
            outcome=session.outcome,
            transfer=placement.transfer,
            known_tokens=request.prompt_tokens + session.outcome.num_tokens,
            decode=decode,
            prefill=prefill,
            moved_hashes=session.attempt.moved_hashes if session.attempt is not None else (),
        )
        session.attempt = attempt
        self._agenda.after(self._timing.control_s, decode.start, attempt)

    def _first_token(self, attempt: Attempt) -> None:
        later_s = self._timing.control_s
        self._agenda.after(later_s, self._desk.say, Prefilled(transfer=attempt.transfer))

    def _ended(self, attempt: Attempt) -> None:
        attempt.over = True
        session = self._sessions.pop(attempt.transfer.request_id)
        later_s = self._timing.control_s
        self._agenda.after(later_s, self._desk.say, Settle(transfer=attempt.transfer))
        session.outcome.finish()

    def _failed(self, attempt: Attempt, code: str) -> None:
        """A worker had no room after all: the request queues again, after a pause."""
        attempt.over = True
        session = self._sessions[attempt.transfer.request_id]
        later_s = self._timing.control_s
        self._agenda.after(later_s, self._desk.say, Settle(transfer=attempt.transfer))
        if session.refusals >= _MAX_REFUSALS:
            self._over(session, code)
            return
        pause_s = _REFUSED_PAUSE_S * 2**session.refusals
        session.refusals += 1
        self._agenda.after(later_s + pause_s, self._enqueue, session)

    def _moved(self, attempt: Attempt) -> None:
        """Its worker serves another role now: the request goes on elsewhere."""
        attempt.over = True
        session = self._sessions[attempt.transfer.request_id]
        session.outcome.num_moves += 1
        later_s = self._timing.control_s
        self._agenda.after(later_s, self._desk.say, Settle(transfer=attempt.transfer))
        pause_s = 0.0 if attempt.began else _MOVED_PAUSE_S
        self._agenda.after(later_s + pause_s, self._enqueue, session)

    def _lost(self, session: _Session, worker: str) -> None:
        """A worker died with the request in it."""
        if session.retries >= _MAX_RETRIES or len(session.lost) >= _MAX_RETRIES:
            self._over(session, "worker_lost")
            return
        session.retries += 1
        session.lost += (worker,)
        self._enqueue(session)

    def _over(self, session: _Session, code: str) -> None:
        del self._sessions[str(session.outcome.request.index)]
        session.outcome.fail(code)

    # --- workers -------------------------------------------------------------------------------

    def _make(self, name: str, life: int) -> Member:
        member: Member
        if self.shape.elastic == "auto":
            role = WorkerRole.PREFILL if name.startswith("prefill") else WorkerRole.DECODE
            member = ElasticMember(name, life, self._around, role)
        elif name.startswith("prefill"):
            member = PrefillMember(name, life, self._around)
        else:
            member = DecodeMember(name, life, self._around)
        self.members[name] = member
        neighbours = [each.worker for each in self.members.values()]
        for each in self.members.values():
            each.worker.neighbours = neighbours
        return member

    def _join(self, member: Member, first_report_s: float) -> None:
        self._desk.join(member.hello(), member.load())
        interval_s = self.shape.report_interval_s
        self._agenda.after(first_report_s * interval_s, self._keep_reporting, member)

    def _keep_reporting(self, member: Member) -> None:
        if member.worker.alive:
            self._report(member)
            self._agenda.after(self.shape.report_interval_s, self._keep_reporting, member)

    def _commanded(self, worker: WorkerRef, command: Turn) -> None:
        """The scheduler says who is to serve the other role."""
        member = self.members[worker.name]
        assert isinstance(member, ElasticMember)
        self.num_turns += 1
        member.begin_turn(command.role)
        self._desk.join(member.hello(), member.load())
        self._desk.report(member.ref, member.load(), member.cache_news(whole=True))
        # The scheduler knows the worker in its new role before anything is given up.
        self._agenda.after(2 * self._timing.control_s, member.end_turn)

    def _report(self, member: Member) -> None:
        self._desk.report(member.ref, member.load(), member.cache_news())

    def _die(self, death: Death) -> None:
        member = self.members.pop(death.worker)
        if isinstance(member, DecodeMember):
            for job in member.worker.die():
                member.flush(job)
        else:
            member.worker.die()
        self._past.append(member.worker)
        self._desk.leave(member.ref)
        affected = dict(member.attempts)
        for session in list(self._sessions.values()):
            attempt = session.attempt
            if attempt is None or attempt.over or member not in (attempt.decode, attempt.prefill):
                continue
            if member is attempt.prefill and attempt.began:
                continue  # its part was done
            affected[attempt.transfer] = attempt
        for attempt in affected.values():
            self._take_back(attempt, member)
        if death.back_after_s is not None:
            self._agenda.after(death.back_after_s, self._come_back, member)

    def _take_back(self, attempt: Attempt, dead: Member) -> None:
        if attempt.over or (dead is attempt.prefill and attempt.began):
            return
        attempt.over = True
        if dead is attempt.decode:
            if attempt.prefill is not None:
                attempt.prefill.give_up(attempt)
        else:
            attempt.decode.let_go(attempt)
        session = self._sessions[attempt.transfer.request_id]
        self._desk.say(Settle(transfer=attempt.transfer))
        later_s = self._timing.control_s
        self._agenda.after(later_s, self._lost, session, str(dead.ref))

    def _come_back(self, dead: Member) -> None:
        self._join(self._make(dead.name, dead.life + 1), 1.0)


def scheduler_config(shape: ClusterShape) -> SchedulerConfig:
    """The settings that the scheduler has."""
    return SchedulerConfig(
        max_queued=shape.max_queued,
        report_interval_s=shape.report_interval_s,
        local_prefill=shape.local_prefill,
        reserve_answer_tokens=shape.reserve_answer_tokens,
        elastic=shape.elastic,
    )
