"""The scheduler's own desk in virtual time: messages reach it late, and it decides when woken.

Nothing of the policy is here: `scheduler.desk.SchedulerDesk` queues, counts and decides as it does
when it serves.
"""

from collections.abc import Callable

from bench.sim.agenda import Agenda
from bench.sim.event_log import EventLog
from core.config import SchedulerConfig
from core.messages import (
    CacheNews,
    GatewayHello,
    HandOver,
    PlacementMessage,
    ScheduleMessage,
    Turn,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from core.tickets import Tickets
from scheduler.cluster import Member
from scheduler.desk import SchedulerDesk

MODEL = "simulated"
_GATEWAY = WorkerRef(name="gateway", incarnation="0")
# Nobody checks the tickets of a simulation.
_SECRET = b"a simulated cluster signs nothing"

Answer = Callable[[PlacementMessage], None]
Command = Callable[[WorkerRef, Turn], None]


class VirtualDesk:
    """One scheduler and one gateway's stream to it. Each message takes `delay_s`."""

    def __init__(
        self,
        config: SchedulerConfig,
        agenda: Agenda,
        *,
        delay_s: float,
        answer: Answer,
        command: Command,
        step_target_s: float,
        log: EventLog | None = None,
    ) -> None:
        self._agenda = agenda
        self._delay_s = delay_s
        self._answer = answer
        self._command = command
        self._log = log
        tickets = Tickets(_SECRET, now_s=self._clock)
        self._desk = SchedulerDesk(
            config, MODEL, tickets, clock=self._clock, step_target_s=step_target_s
        )
        self._members: dict[WorkerRef, Member] = {}
        self._woken = False
        self._again_s = float("inf")

    def _clock(self) -> float:
        return self._agenda.now_s

    def start(self) -> None:
        """The gateway says hello, at once."""
        self._says(GatewayHello(gateway=_GATEWAY))

    def say(self, message: ScheduleMessage) -> None:
        """The gateway sends a message."""
        self._agenda.after(self._delay_s, self._says, message)

    def join(self, hello: WorkerHello, load: WorkerLoad) -> None:
        """A worker registers, at once."""
        worker = hello.endpoint.worker
        self._record("joined", hello)
        member = self._members[worker] = self._desk.worker_joined(hello)

        def tell(command: Turn | HandOver) -> None:
            # Nobody leaves here: a worker that is no longer there has died.
            assert isinstance(command, Turn)
            self._agenda.after(self._delay_s, self._command, worker, command)

        member.tell = tell
        self._loaded(worker, load)

    def report(self, worker: WorkerRef, load: WorkerLoad, news: CacheNews | None = None) -> None:
        """A worker reports."""
        if news is not None:
            self._agenda.after(self._delay_s, self._news, worker, news)
        self._agenda.after(self._delay_s, self._loaded, worker, load)

    def leave(self, worker: WorkerRef) -> None:
        """A worker's stream broke."""
        self._agenda.after(self._delay_s, self._left, worker)

    def _says(self, message: ScheduleMessage) -> None:
        self._record("said", message)
        self._desk.gateway_says(str(_GATEWAY), message, self._reply)
        self._wake()

    def _loaded(self, worker: WorkerRef, load: WorkerLoad) -> None:
        if (member := self._members.get(worker)) is not None:
            self._record("load", load, worker)
            self._desk.worker_says(member, load)
            self._wake()

    def _news(self, worker: WorkerRef, news: CacheNews) -> None:
        if (member := self._members.get(worker)) is not None:
            self._record("cached", news, worker)
            self._desk.worker_cached(member, news)

    def _left(self, worker: WorkerRef) -> None:
        if (member := self._members.pop(worker, None)) is not None:
            self._record("left", None, worker)
            self._desk.worker_left(member)
            self._wake()

    def _reply(self, message: PlacementMessage) -> bool:
        self._record("reply", message)
        self._agenda.after(self._delay_s, self._answer, message)
        return True

    def _wake(self) -> None:
        """Once for all that happens now."""
        if not self._woken:
            self._woken = True
            self._agenda.after(0.0, self._decide)

    def _decide(self) -> None:
        self._woken = False
        self._record("decide", None)
        again_s = self._desk.decide_now()
        # Only a queue is looked at again by itself; an idle desk would keep time going for ever.
        if self._desk.num_queued and not (self._agenda.now_s < self._again_s <= again_s):
            self._again_s = again_s
            self._agenda.at(again_s, self._look_again, again_s)

    def _look_again(self, due_s: float) -> None:
        if due_s == self._again_s:
            self._again_s = float("inf")
            self._wake()

    def _record(self, kind: str, message: object, worker: WorkerRef | None = None) -> None:
        if self._log is not None:
            self._log.add(self._agenda.now_s, kind, message, worker)
