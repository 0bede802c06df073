"""The real desk over workers in virtual time: computing takes time, and nothing else does."""

import heapq
import itertools
from dataclasses import dataclass, field

from core.config import SchedulerConfig
from core.messages import (
    BlockCounts,
    Compatibility,
    Endpoint,
    Enqueue,
    GatewayHello,
    Placement,
    Prefilled,
    Rejection,
    Settle,
    StepCost,
    TransferId,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Tickets
from scheduler.desk import SchedulerDesk

SAME = Compatibility(
    model="m", revision="1", dtype="d", block_size=16, block_bytes=8, layout="l", protocol=1
)
NUM_BLOCKS = 10_000
PREFILL_TOKENS_PER_S = 5000.0
READER_TOKENS_PER_S = 1000.0
STEP_S = 0.02
REPORT_S = 1.0


@dataclass
class Fate:
    """What became of one request; times are virtual."""

    tenant: str
    asked_s: float
    deadline_s: float
    answer_tokens: int
    first_s: float | None = None
    ended_s: float | None = None
    refused_s: float | None = None

    @property
    def good(self) -> bool:
        return self.ended_s is not None and self.ended_s <= self.deadline_s


@dataclass
class VirtualCluster:
    """One prefill worker, which reads one prompt after the other, and decode workers."""

    num_decodes: int = 1
    max_seqs: int = 32
    now_s: float = 0.0
    fates: dict[TransferId, Fate] = field(default_factory=dict)

    def __post_init__(self):
        self._events = []
        self._number = itertools.count()
        self._free_s = {}
        self.desk = SchedulerDesk(
            SchedulerConfig(max_queued=10_000), "m", Tickets(bytes(32)), lambda: self.now_s
        )
        self.desk.gateway_says(
            "g", GatewayHello(gateway=WorkerRef(name="g", incarnation="1")), self._hears
        )
        self._members = [self._join("p", WorkerRole.PREFILL)]
        self._members += [self._join(f"d{n}", WorkerRole.DECODE) for n in range(self.num_decodes)]
        self._report()

    def ask(self, at_s, *, prompt=512, answer=50, remaining_s=10.0, tenant=""):
        transfer = TransferId(request_id=f"r{next(self._number)}", attempt=1)
        self.fates[transfer] = Fate(tenant, at_s, at_s + remaining_s, answer)
        message = Enqueue(
            transfer=transfer,
            model="m",
            prompt_tokens=prompt,
            max_new_tokens=answer,
            remaining_s=remaining_s,
            tenant=tenant,
        )
        self._at(at_s, lambda: self._says(message))

    def run(self, until_s):
        """Lets everything happen that happens before."""
        again_s = 0.0
        while True:
            next_s = min(self._events[0][0] if self._events else until_s, again_s)
            if next_s >= until_s:
                return
            self.now_s = max(self.now_s, next_s)
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            again_s = self.desk.decide_now()

    def of(self, tenant):
        return [fate for fate in self.fates.values() if fate.tenant == tenant]

    def _at(self, when_s, happen):
        heapq.heappush(self._events, (when_s, next(self._number), happen))

    def _says(self, message):
        self.desk.gateway_says("g", message, self._hears)

    def _join(self, name, role):
        hello = WorkerHello(
            endpoint=Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}"),
            role=role,
            compatibility=SAME,
            num_blocks=NUM_BLOCKS,
            max_seqs=self.max_seqs,
            max_step_tokens=512,
            local_prefill=role is WorkerRole.DECODE,
        )
        return self.desk.worker_joined(hello)

    def _report(self):
        for member in self._members:
            decode = member.hello.role is WorkerRole.DECODE
            speed = READER_TOKENS_PER_S if decode else PREFILL_TOKENS_PER_S
            load = WorkerLoad(
                blocks=BlockCounts(free=NUM_BLOCKS),
                num_running=0,
                num_waiting=0,
                prefill_tokens_per_s=speed,
                step_s=STEP_S if decode else 0.1,
                cost=StepCost(base_s=STEP_S if decode else 0.0, token_s=1 / speed),
            )
            self.desk.worker_says(member, load)
        self._at(self.now_s + REPORT_S, self._report)

    def _hears(self, message):
        if isinstance(message, Rejection):
            self.fates[message.transfer].refused_s = self.now_s
        elif isinstance(message, Placement):
            fate = self.fates[message.transfer]
            reader = (message.prefill or message.decode).worker.name
            speed = PREFILL_TOKENS_PER_S if message.prefill else READER_TOKENS_PER_S
            held = self.desk.cluster.held[message.transfer].holding
            read_s = max(self.now_s, self._free_s.get(reader, 0.0)) + held.prompt_tokens / speed
            self._free_s[reader] = read_s
            self._at(read_s, lambda: self._first_token(message.transfer, fate))
            end_s = read_s + fate.answer_tokens * STEP_S
            self._at(end_s, lambda: self._ended(message.transfer, fate))
        return True

    def _first_token(self, transfer, fate):
        fate.first_s = self.now_s
        self._says(Prefilled(transfer=transfer))

    def _ended(self, transfer, fate):
        fate.ended_s = self.now_s
        self._says(Settle(transfer=transfer))
