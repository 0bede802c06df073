"""The decode worker's one owner of state: leases blocks, has them filled, decodes, tells gateways.

Everything happens on the event loop. Messages, steps, timers and lost streams become events of the
receiver's machine (`kv_transfer.states`); this module carries its actions out. What faces prefill
workers is in `decode_worker.prefill_side`.
"""

import asyncio
import collections
import functools
import time
from collections.abc import Callable, Mapping

import structlog

from core import rpc
from core.config import TransferConfig
from core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Moved,
    Overloaded,
    TandemError,
    Unavailable,
    WorkerLost,
    to_failure,
)
from core.messages import (
    Adopted,
    CacheNews,
    Cancel,
    CancelTransfer,
    Compatibility,
    Counter,
    Ended,
    Failure,
    Start,
    StopReason,
    TransferId,
    WorkerLoad,
    WorkerRef,
)
from core.metrics.worker import WorkerMetrics
from core.telemetry.span import Span
from core.telemetry.trace import RequestTrace
from core.telemetry.tracer import NO_TRACER, Tracer
from core.tickets import Claim, Right, Tickets
from decode_worker.gateway_port import GatewayPort
from decode_worker.prefill_side import PrefillSide
from decode_worker.session import Session
from decode_worker.spans import SessionSpans
from engine.block_manager import OutOfBlocks
from engine.engine import SequenceEvent
from engine.host import EngineHost
from engine.sequence import SequenceKey
from kv_transfer import states
from kv_transfer.blocks import block_store
from kv_transfer.states import ReceiverAction, ReceiverEvent, ReceiverState
from kv_transfer.transport import BlockReceiver


class DecodeDesk:
    """Owns the sessions and the engine of one decode worker."""

    def __init__(
        self,
        me: WorkerRef,
        host: EngineHost,
        compatibility: Compatibility,
        receivers: Mapping[str, BlockReceiver],
        config: TransferConfig,
        tickets: Tickets,
        *,
        reads_prompts: bool,
        metrics: WorkerMetrics | None = None,
        tracer: Tracer = NO_TRACER,
        dial: rpc.Dial = rpc.channel,
    ) -> None:
        self._me = me
        self._host = host
        self._reads_prompts = reads_prompts
        self._tickets = tickets
        self._tracer = tracer
        self._sessions: dict[TransferId, Session] = {}
        self._engine = host.engine(
            on_step=self._stepped,
            on_error=self._step_failed,
            itl_target_s=host.config.itl_target_s or None,
        )
        if metrics is not None:
            self._engine.on_measured = metrics.stepped
        self._tasks = asyncio.TaskGroup()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._ended = False
        self._report_now: Callable[[], None] = lambda: None
        self._had_preempted = False
        self._counts: collections.Counter[str] = collections.Counter()
        self._log = structlog.get_logger()
        self._prefills = PrefillSide(
            me,
            compatibility,
            block_store(
                host.kv.bytes,
                host.kv.device_bytes,
                await_written=host.kv.await_written,
                device_digests=host.device_digests(),
            ),
            receivers,
            config,
            ranks=host.spec.ranks,
            sessions=self._sessions,
            counts=self._counts,
            tasks=self._tasks,
            happened=self._happened,
            dial=dial,
        )

    async def run(self) -> None:
        """Receives and decodes until cancelled."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._engine.run())
                self._tasks.create_task(self._prefills.run())
        finally:
            self._ended = True

    async def drained(self) -> None:
        """Returns once no session is left. New ones are refused from now on."""
        self.draining = True
        await self.idle()

    async def idle(self) -> None:
        """Returns once no session is left, though others may come."""
        await self._idle.wait()

    def hand_over(self) -> tuple[str, ...]:
        """Gives every request up: its gateway asks for another placement and goes on there.

        New ones are refused from now on, in the same way. Gives the ids of those given up.
        """
        self.draining = True
        failure = to_failure(self._moved())
        given_up = [
            each for each in self._sessions.values() if each.outcome is StopReason.UNSPECIFIED
        ]
        for session in given_up:
            self._counts["handed_over"] += 1
            self._stop(session, StopReason.ERROR, failure)
        return tuple(each.transfer.request_id for each in given_up)

    def take_work(self) -> None:
        """Takes requests again after it gave them up."""
        self.draining = False

    def _moved(self) -> Moved:
        return Moved(f"{self._me} takes no requests now")

    @property
    def stalled_s(self) -> float:
        """For how long the step loop has had work and has not come round."""
        return self._engine.stalled_s

    def not_ready(self) -> str | None:
        """Why no request is taken now; None where one is."""
        if self.draining:
            return "it is draining"
        return None if self._reads_prompts else self._prefills.incompatible

    def leases(self) -> Mapping[str, int]:
        """Requests by the state of their hand-off's machine."""
        return states.tally(ReceiverState, (each.state for each in self._sessions.values()))

    def load(self) -> WorkerLoad:
        """What the scheduler is told."""
        return WorkerLoad(
            blocks=self._host.blocks.counts(),
            num_running=self._engine.num_running,
            num_waiting=self._num_waiting(),
            num_preempted=self._engine.num_preempted,
            backlog_tokens=self._engine.backlog_tokens,
            prefill_tokens_per_s=self._engine.pacer.prompt_tokens_per_s(self._engine.num_decoding),
            step_s=self._engine.pacer.step_s,
            cost=self._engine.pacer.cost.cost(),
            draining=self.draining,
            counters=self._counters(),
        )

    def cache_news(self, whole: bool) -> CacheNews:
        """What the prefix cache holds, or what it has gained and lost since it was last told."""
        return self._host.cache_news(whole=whole)

    def report_when_it_matters(self, report_now: Callable[[], None]) -> None:
        """Calls this where the scheduler should hear at once how the worker is loaded."""
        self._report_now = report_now

    def _num_waiting(self) -> int:
        """Requests whose prompt is not here yet, and answers of which nothing is computed."""
        adopted = sum(1 for each in self._sessions.values() if each.going)
        return len(self._sessions) - adopted + self._engine.num_waiting

    def _counters(self) -> tuple[Counter, ...]:
        if self._host.blocks.counts().total != self._host.spec.num_blocks:
            self._counts["ledger_errors"] += 1
            self._log.error("blocks_lost", counts=self._host.blocks.counts())
        counts = dict(self._counts)
        counts["preemptions"] = self._engine.preemptions
        counts["blocks_evicted"] = self._host.blocks.num_evicted
        counts |= self._prefills.counters()
        return tuple(Counter(name=name, value=n) for name, n in sorted(counts.items()))

    # --- what the gateways say -----------------------------------------------------------------

    def start(self, start: Start, port: GatewayPort) -> None:
        """Takes a request, or ends it with a reason. A repeated Start is dropped."""
        if start.transfer in self._sessions:
            self._counts["stale_messages"] += 1
            return
        started_s = time.monotonic()
        spans = SessionSpans(self._tracer, start, started_s)
        try:
            self._admit(start, port, started_s, spans)
        except TandemError as error:
            spans.over(time.monotonic(), StopReason.ERROR, to_failure(error))
            self._counts[f"refused_{error.code}"] += 1
            if isinstance(error, Overloaded):  # it is fuller than the scheduler believes
                self._report_now()
            ended = Ended(
                transfer=start.transfer, reason=StopReason.ERROR, failure=to_failure(error)
            )
            port.ended(ended)

    def _admit(
        self, start: Start, port: GatewayPort, started_s: float, spans: SessionSpans
    ) -> None:
        if start.decode != self._me:
            raise WorkerLost(f"{start.decode} is gone; this is {self._me}", culprit=start.decode)
        claim = Claim(
            right=Right.HANDOFF,
            prefill=start.prefill.worker if start.prefill is not None else None,
            decode=self._me,
            transfer=start.transfer,
        )
        self._tickets.check(claim, start.ticket)
        if self.draining:
            raise self._moved()
        if start.prefill is None and not self._reads_prompts:
            raise Unavailable(f"{self._me} reads no prompts itself", culprit=self._me)
        if start.remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the hand-off")
        self._check(start)
        session = self._session(start, port, started_s, spans)
        spans.reserved(len(session.lease.block_ids), session.cached_tokens)
        self._sessions[start.transfer] = session
        self._idle.clear()
        session.deadline_timer = asyncio.get_running_loop().call_later(
            start.remaining_s, self._deadline_passed, session
        )
        if start.prefill is None or self._is_sooner_read_here(session):
            self._counts["local_prefills"] += 1
            spans.reads(time.monotonic())
            self._happened(session, ReceiverEvent.LOCAL)
        else:
            session.lease.to_transfer()
            self._tasks.create_task(self._prefills.ask(session))

    def _check(self, start: Start) -> None:
        """Raises InvalidRequest for tokens, or answers, that the engine cannot take."""
        choices = {branch.choice for branch in start.branches}
        if not choices or len(choices) != len(start.branches):
            raise InvalidRequest("no answer to give, or one twice", field="branches")
        for branch in start.branches:
            self._host.check_tokens(start.prompt_token_ids + branch.sent_token_ids)
            if len(branch.sent_token_ids) >= start.sampling.max_new_tokens:
                raise InvalidRequest("nothing is left to generate", field="sent_token_ids")
        if not start.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", field="prompt_token_ids")

    def _session(
        self, start: Start, port: GatewayPort, started_s: float, spans: SessionSpans
    ) -> Session:
        """Leases blocks for the prompt and one token: more come as the answer grows."""
        known = start.prompt_token_ids + start.branches[0].sent_token_ids
        if self._engine.num_preempted:
            raise OutOfBlocks("requests that came earlier wait for KV blocks", culprit=self._me)
        leased = self._host.lease(
            known,
            len(known) + 1,
            start.cache_salt,
            reuse=not start.sampling.prompt_logprobs,  # else who reads it would not compute it all
        )
        num_cached = leased.lease.num_shared
        self._counts["prefix_cache_queries"] += len(known)
        self._counts["prefix_cache_hits"] += num_cached * self._host.block_size
        return Session(
            start=start,
            port=port,
            lease=leased.lease,
            num_cached_blocks=num_cached,
            num_prompt_blocks=self._host.blocks_for(len(known)),
            block_hashes=leased.hashes,
            cached_tokens=num_cached * self._host.block_size,
            started_s=started_s,
            spans=spans,
        )

    def _is_sooner_read_here(self, session: Session) -> bool:
        """Whether the next step can compute all that the prefix cache lacks of the prompt."""
        one_step = self._engine.pacer.max_prompt_tokens(self._engine.num_decoding)
        missing = len(session.known_token_ids) - session.cached_tokens
        return self._reads_prompts and missing + self._engine.backlog_tokens <= one_step

    def keep_trace(self, request_id: str) -> None:
        """What was recorded of this request is to be exported, here and by who read its prompt."""
        self._tracer.keep(request_id)

    def cancel(self, cancel: Cancel) -> None:
        """The gateway needs no more of it; why is in the reason. Unknown where it just ended."""
        session = self._sessions.get(cancel.transfer)
        if session is None:
            return
        if not cancel.choices:
            self._stop(session, cancel.reason, None)
        for choice in cancel.choices:
            if session.has_first_token and choice in session.going:
                self._tasks.create_task(self._cut_off(session, choice, cancel.reason))

    def gateway_left(self, port: GatewayPort) -> None:
        """A gateway's stream ended: nobody reads its tokens any more."""
        if self._ended:
            return
        for session in list(self._sessions.values()):
            if session.port is port:
                self._stop(session, StopReason.CANCELLED, None)

    def _deadline_passed(self, session: Session) -> None:
        failure = to_failure(DeadlineExceeded("the deadline passed"))
        self._stop(session, StopReason.TIMEOUT, failure)

    def _stop(self, session: Session, reason: StopReason, failure: Failure | None) -> None:
        session.concludes(reason, failure)
        if session.state is ReceiverState.ADOPTED:
            self._tasks.create_task(self._leave_batch(session))
        else:
            self._happened(session, ReceiverEvent.STOPPED)

    async def _leave_batch(self, session: Session) -> None:
        await self._engine.remove(*(each.key for each in session.going.values()))
        self._happened(session, ReceiverEvent.DONE)

    async def _cut_off(self, session: Session, choice: int, reason: StopReason) -> None:
        """Ends one answer of several."""
        await self._engine.remove(SequenceKey(session.transfer, choice))
        if choice in session.going:  # else it ended by itself meanwhile
            self._answered(session, choice, reason)

    def _answered(self, session: Session, choice: int, reason: StopReason) -> None:
        """One answer is over; with the last one, the request is."""
        session.stands_still(choice)
        if not session.going:
            session.concludes(reason)
            self._happened(session, ReceiverEvent.DONE)

    # --- what the engine says ------------------------------------------------------------------

    def _stepped(self, events: tuple[SequenceEvent, ...]) -> None:
        now_s = time.monotonic()
        if (has_preempted := self._engine.num_preempted > 0) != self._had_preempted:
            self._had_preempted = has_preempted  # nothing is placed here until all run again
            self._report_now()
        linked: list[tuple[RequestTrace, Span]] = []
        for event in events:
            session = self._sessions[event.key.transfer]
            if session.prefill_began_s is None:
                session.prefill_began_s = now_s - event.compute_s
            if session.spans.trace.recording:
                self._traced(session, event, now_s, linked)
            if event.prompt_logprobs and session.outcome is StopReason.UNSPECIFIED:
                session.port.tokens(session.scored(event.prompt_logprobs))
            if event.token_id is None or session.outcome is not StopReason.UNSPECIFIED:
                continue  # stopped, and about to leave the batch
            if session.has_first_token:
                session.port.tokens(session.sampled(event))
            else:
                session.has_first_token = True
                session.spans.decodes(now_s)
                session.port.tokens(session.first_local_token(event, now_s))
                self._branch_out(session)
            if event.stop_reason is not None:
                self._answered(session, event.key.choice, event.stop_reason)

        if linked:
            began_s = now_s - events[0].compute_s
            number = self._engine.steps
            self._tracer.step(began_s, now_s, linked, sequences=len(events), number=number)

    def _traced(
        self,
        session: Session,
        event: SequenceEvent,
        now_s: float,
        linked: list[tuple[RequestTrace, Span]],
    ) -> None:
        """Notes in the session's span what the step did; links the step where that is an event."""
        spans, sequence = session.spans, session.going.get(event.key.choice)
        if not session.has_first_token:
            spans.chunk(now_s, event.num_computed_tokens, event.compute_s)
        elif sequence is None or not spans.token(now_s, sequence.num_preemptions):
            return
        if spans.trace.sampled:
            linked.append((spans.trace, spans.stage))

    def _step_failed(self, keys: tuple[SequenceKey, ...], error: Exception) -> None:
        failed: Exception = error
        if not isinstance(error, InvalidRequest):
            self._log.error("step_failed", requests=[str(key) for key in keys], exc_info=error)
            failed = Internal(f"the step failed: {type(error).__name__}", culprit=self._me)
        for session in {self._sessions[key.transfer] for key in keys}:
            self._stop(session, StopReason.ERROR, to_failure(failed))

    # --- the machine's actions -----------------------------------------------------------------

    def _happened(self, session: Session, event: ReceiverEvent) -> None:
        for action in session.machine.move(event):
            match action:
                case ReceiverAction.SEND_PREFILL:
                    refuse = functools.partial(self._stop, session, StopReason.ERROR)
                    self._prefills.send_prefill(session, never_accepted=refuse)
                case ReceiverAction.SEND_ADOPTED:
                    self._prefills.send(session, Adopted(transfer=session.transfer))
                case ReceiverAction.SEND_CANCEL:
                    self._prefills.send(session, CancelTransfer(transfer=session.transfer))
                case ReceiverAction.VERIFY:
                    self._tasks.create_task(self._prefills.verify(session))
                case ReceiverAction.ADOPT:
                    self._adopt(session)
                case ReceiverAction.QUARANTINE:
                    session.lease.quarantine()
                case ReceiverAction.SEEK_PROOF:
                    self._prefills.seek_proof(session)
                case ReceiverAction.FREE:
                    self._free(session)
                case ReceiverAction.FAIL:
                    self._told(session)
                case ReceiverAction.END:
                    self._end(session)

    def _adopt(self, session: Session) -> None:
        commit = session.commit
        if commit is None:  # the prompt is read here
            self._engine.add(session.begin())
            return
        self._counts["adoptions"] += 1
        self._prefills.close_access(session)
        session.lease.to_owned()
        session.has_first_token = True
        lead = session.begin()
        now_s = time.monotonic()
        session.spans.decodes(now_s)
        session.port.tokens(session.first_tokens(now_s))
        if commit.stop_reason is StopReason.UNSPECIFIED:
            self._engine.add(lead)
            self._branch_out(session)
        else:  # the first token ended the lead, not those that share its prompt
            self._branch_out(session)
            session.stands_still(lead.key.choice)

    def _branch_out(self, session: Session) -> None:
        for sequence in session.branch_out(self._host.block_size):
            self._counts["branches"] += 1
            self._engine.add(sequence)

    def _end(self, session: Session) -> None:
        commit = session.commit
        if commit is not None and not session.has_first_token:  # it ended with its first token
            session.port.tokens(session.first_tokens(time.monotonic()))
        self._told(session)

    def _told(self, session: Session) -> None:
        """The gateway hears how it ended, once."""
        session.port.ended(session.ended())
        session.spans.over(time.monotonic(), session.outcome, session.failure)

    def _free(self, session: Session) -> None:
        session.stop_timers()
        self._prefills.close_access(session)
        for choice in list(session.going):
            session.stands_still(choice)
        session.lease.release()
        del self._sessions[session.transfer]
        if not self._sessions:
            self._idle.set()
