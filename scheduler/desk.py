"""The scheduler's one owner of state: takes messages, runs the policy, answers.

Everything happens on the event loop. Messages only change state and wake `run`, which calls
`decide_now` once for all that has changed since, and again when a worker is expected to be free.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from core.config import SchedulerConfig
from core.messages import (
    CacheNews,
    Endpoint,
    Enqueue,
    Explanation,
    Failure,
    GatewayHello,
    HandOver,
    Holding,
    KeepTrace,
    Placement,
    PlacementMessage,
    PoolSizes,
    Prefilled,
    Rejection,
    ScheduleMessage,
    Settle,
    Ticket,
    TransferId,
    Withdraw,
    WorkerHello,
    WorkerLoad,
    WorkerRole,
)
from core.tickets import Claim, Right, Tickets
from scheduler.choice import WINDOW_S
from scheduler.cluster import Cluster, Member
from scheduler.cost import service_cost
from scheduler.elastic import Split
from scheduler.measures import DrainRate
from scheduler.order import RequestQueue
from scheduler.policy import (
    Decision,
    Disaggregated,
    Local,
    Reject,
    decide,
    not_ready,
    refuse_early,
)
from scheduler.roles import STEP_TARGET_S, Roles
from scheduler.shares import Shares
from scheduler.spans import QueueSpans
from scheduler.split_file import SplitFile
from scheduler.view import ClusterView, Rules, Waiting

_TICK_S = 0.5  # how late an expired deadline may be noticed
_LEAST_RETRY_AFTER_S = 1.0
_MOST_RETRY_AFTER_S = 600.0
_PATIENCE_S = 30.0  # a worker that crashed is back well before
_EXCLUDED_S = 10.0  # a worker that is lost leaves the cluster well before
_NO_WORKERS = not_ready(ClusterView()) or ""

Reply = Callable[[PlacementMessage], bool]


@dataclass(frozen=True, slots=True)
class _Asker:
    """Whom to answer."""

    gateway: str
    reply: Reply
    explain: bool


class SchedulerDesk:
    """Owns the queue and the cluster of one model."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: str,
        tickets: Tickets,
        clock: Callable[[], float] = time.monotonic,
        *,
        spans: QueueSpans | None = None,
        step_target_s: float = STEP_TARGET_S,
        kept_split: SplitFile | None = None,
    ) -> None:
        self._config = config
        self.model = model
        self._tickets = tickets
        self._clock = clock
        self._spans = spans or QueueSpans()
        self._queue = RequestQueue()
        self._askers: dict[TransferId, _Asker] = {}
        self._shares = Shares()
        # The cluster at the last decision.
        self._seen = ClusterView()
        self._drain = DrainRate()
        rules = Rules(
            local_prefill=config.local_prefill, reserve_answer_tokens=config.reserve_answer_tokens
        )
        self.cluster = Cluster(rules)
        self.roles = Roles(config, self.cluster, step_target_s=step_target_s, kept=kept_split)
        # Placements made, by who reads the prompt.
        self.num_placements = collections.Counter(disaggregated=0, local=0)
        self.num_rejections: collections.Counter[str] = collections.Counter()
        self._gateways: dict[str, Reply] = {}
        # Where each gateway says that it is scraped.
        self.gateway_admins: dict[str, str] = {}
        self._pool_sizes = PoolSizes(
            prefill_workers=0, decode_workers=0, not_ready=_NO_WORKERS, model=model
        )
        self._empty_since_s: float | None = None
        self._wake = asyncio.Event()
        self._log = structlog.get_logger()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def max_queued(self) -> int:
        """With so many waiting, one more is refused."""
        return self._config.max_queued

    def knows(self, transfer: TransferId) -> bool:
        """Whether it waits here, or holds something."""
        return transfer in self._askers or transfer in self.cluster.held

    def takes_over(self) -> None:
        """It leads from now on: gateways and workers are yet to come, and are waited for anew."""
        self._empty_since_s = None
        self.roles.recall()
        self._wake.set()

    # --- gateways ------------------------------------------------------------------------------

    def gateway_says(self, gateway: str, message: ScheduleMessage, reply: Reply) -> None:
        """One message of a gateway's stream."""
        match message:
            case GatewayHello():
                self._gateways[gateway] = reply
                self.gateway_admins[gateway] = message.admin_address
                reply(self._pool_sizes)
                for holding in message.holdings:
                    self.cluster.hold(gateway, holding, now_s=self._clock())
            case Enqueue():
                self._enqueue(gateway, message, reply)
            case Withdraw():
                self._forget(message.transfer)
                self._spans.withdrawn(message.transfer, self._clock())
                # The withdrawal may have crossed the placement; both end here.
                self.cluster.settle(message.transfer)
            case Prefilled():
                self.cluster.prefilled(message.transfer, now_s=self._clock())
            case Settle():
                self.cluster.settle(message.transfer, now_s=self._clock())
            case KeepTrace():
                self._spans.keep(message.request_id)
                return
        self._wake.set()

    def gateway_left(self, gateway: str, reply: Reply) -> None:
        """A gateway's stream ended: nobody waits for its requests any more.

        The late end of an earlier stream of the same gateway changes nothing.
        """
        if self._gateways.get(gateway) is not reply:
            return
        del self._gateways[gateway]
        del self.gateway_admins[gateway]
        self.cluster.drop_gateway(gateway)
        for transfer in [key for key, asker in self._askers.items() if asker.gateway == gateway]:
            self._forget(transfer)
            self._spans.withdrawn(transfer, self._clock())
        self._wake.set()

    def _enqueue(self, gateway: str, message: Enqueue, reply: Reply) -> None:
        now_s = self._clock()
        self._spans.enqueued(message, now_s)
        waiting = Waiting(
            transfer=message.transfer,
            prompt_tokens=message.prompt_tokens,
            max_new_tokens=message.max_new_tokens,
            num_choices=message.num_choices,
            deadline_s=now_s + message.remaining_s,
            excluded=frozenset(message.excluded_workers),
            excluded_until_s=now_s + _EXCLUDED_S,
            enqueued_s=now_s,
            tenant=message.tenant,
            priority=message.priority,
            block_hashes=message.block_hashes,
        )
        view = self._seen
        waiting = replace(waiting, cost=service_cost(view, waiting))
        self._shares.seen(message.tenant, now_s=now_s)
        if message.transfer.attempt == 1:
            answer_tokens = view.expected_answer_tokens(waiting)
            self.roles.arrived(waiting, answer_tokens, now_s=now_s)
        displaced = None
        if len(self._queue) >= self._config.max_queued:
            displaced = self._queue.displaced_by(waiting)
            if displaced is None:
                self._reject(reply, self._full(message.transfer))
                return
        ahead = self._queue.ahead_of(waiting)
        if (reject := refuse_early(view, waiting, ahead=ahead, now_s=now_s)) is not None:
            self._reject(reply, reject)
            return
        if displaced is not None:
            self._carry_out(self._full(displaced.transfer))
        self._queue.add(waiting)
        self._askers[message.transfer] = _Asker(gateway, reply, message.explain)

    def _full(self, transfer: TransferId) -> Reject:
        message = f"{self._config.max_queued} requests wait already"
        return Reject(transfer=transfer, failure=Failure(code="overloaded", message=message))

    def _forget(self, transfer: TransferId, *, served: bool = False) -> Waiting | None:
        self._askers.pop(transfer, None)
        return self._queue.remove(transfer, served=served)

    def _retry_after_s(self) -> float:
        """When the queue will have drained, at the speed at which it does."""
        drain_s = self._queue.cost / self._drain.per_s if self._drain.per_s else 0.0
        return min(max(drain_s, _LEAST_RETRY_AFTER_S), _MOST_RETRY_AFTER_S)

    # --- workers -------------------------------------------------------------------------------

    def worker_joined(self, hello: WorkerHello) -> Member:
        """A worker's stream began; gives its membership for the calls below."""
        earlier = self.cluster.members.get(str(hello.endpoint.worker))
        member = self.cluster.join(hello, now_s=self._clock())
        self.roles.joined(member, earlier)
        role = hello.role.name.lower()
        self._log.info("worker_joined", worker=member.key, role=role, model=self.model)
        return member

    def worker_says(self, member: Member, load: WorkerLoad) -> None:
        """A worker reports."""
        self.cluster.reports(member, load)
        if load.draining:
            self._relieve(member)
        self._wake.set()

    def _relieve(self, member: Member) -> None:
        """A worker leaves: what it decodes goes on at its peers, where it has any."""
        decodes = member.hello.role is WorkerRole.DECODE
        if decodes and not member.hands_over and self.cluster.view().decodes:
            member.hands_over = True
            member.tell(HandOver())
            self._log.info("worker_hands_over", worker=member.key)

    def worker_cached(self, member: Member, news: CacheNews) -> None:
        """A worker's prefix cache has gained or lost blocks."""
        self.cluster.cache_news(member, news)

    def worker_left(self, member: Member) -> None:
        """A worker's stream ended. The late end of an earlier stream changes nothing."""
        if self.cluster.leave(member):
            self._log.info("worker_left", worker=member.key, model=self.model)
            self._wake.set()

    def choose_split(self, split: Split | None) -> None:
        """A person says how many workers serve each role; None: the demand does.

        Raises InvalidRequest that names the field and its limit.
        """
        self.roles.override(split)
        self._wake.set()

    # --- decisions -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Decides whenever something changed, until cancelled."""
        pause_s = _TICK_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            again_s = self.decide_now()
            pause_s = min(_TICK_S, max(0.001, again_s - self._clock()))

    def decide_now(self) -> float:
        """Decides once for all that has changed; gives when to call it again at the latest.

        A time of the desk's clock. `run` calls it; the simulator does so itself.
        """
        now_s = self._clock()
        self.cluster.prefixes.forget(now_s=now_s)
        self.roles.look(now_s, queued_cost=self._queue.cost)
        greedy = self._shares.greedy(self.cluster.num_running, now_s=now_s)
        view = self.cluster.view(drain_per_s=self._drain.per_s, greedy=greedy)
        if self._config.max_running is not None:
            room = max(0, self._config.max_running - len(self.cluster.held))
            view = replace(view, max_placements=room)
        self._seen = view
        self._tell_pool_sizes(view)
        self._refuse_if_nobody_comes(view)
        served = 0.0
        if self._queue:
            self._queue.age(now_s)
            for decision in self._decide(view, now_s):
                served += self._carry_out(decision)
        self._drain.observe(now_s, served=served, waiting=bool(self._queue))
        return self._again_s(now_s)

    def _decide(self, view: ClusterView, now_s: float) -> list[Decision]:
        return decide(view, self._queue, now_s=now_s)

    def _again_s(self, now_s: float) -> float:
        """When the next worker will take a prompt, though no message may come before."""
        soonest_s = now_s + _TICK_S
        if self._queue:
            for member in self.cluster.members.values():
                if not member.unread:
                    continue
                for busy_s in (member.busy_until_s, member.guest_busy_until_s):
                    if now_s < busy_s - WINDOW_S < soonest_s:
                        soonest_s = busy_s - WINDOW_S
        return soonest_s

    def _refuse_if_nobody_comes(self, view: ClusterView) -> None:
        """A worker that restarts is worth waiting for; a pool that stays empty is not."""
        reason = not_ready(view)
        now_s = self._clock()
        if reason is None:
            self._empty_since_s = None
            return
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if now_s - self._empty_since_s >= _PATIENCE_S:
            failure = Failure(code="unavailable", message=reason)
            for transfer in list(self._askers):
                self._carry_out(Reject(transfer=transfer, failure=failure))

    def _tell_pool_sizes(self, view: ClusterView) -> None:
        sizes = PoolSizes(
            prefill_workers=len(view.prefills),
            decode_workers=len(view.decodes),
            not_ready=not_ready(view) or "",
            model=self.model,
        )
        if sizes != self._pool_sizes:
            self._pool_sizes = sizes
            for reply in self._gateways.values():
                reply(sizes)

    def _ticket(self, waiting: Waiting, prefill: Endpoint | None, decode: Endpoint) -> Ticket:
        claim = Claim(
            right=Right.HANDOFF,
            prefill=prefill.worker if prefill is not None else None,
            decode=decode.worker,
            transfer=waiting.transfer,
        )
        return self._tickets.sign(claim, lifetime_s=waiting.deadline_s - self._clock())

    def _carry_out(self, decision: Decision) -> float:
        """Takes the request from the queue and answers; gives the work that was served."""
        asker = self._askers[decision.transfer]
        served = not isinstance(decision, Reject)
        waiting = self._forget(decision.transfer, served=served)
        assert waiting is not None
        match decision:
            case Disaggregated(prefill=prefill, decode=decode):
                self.num_placements["disaggregated"] += 1
                self._place(asker, waiting, prefill, decode, decision.explanation)
            case Local(decode=decode):
                self.num_placements["local"] += 1
                self._place(asker, waiting, None, decode, decision.explanation)
            case Reject():
                self._reject(asker.reply, decision)
        return waiting.cost if served else 0.0

    def _reject(self, reply: Reply, reject: Reject) -> None:
        rejection = Rejection(
            transfer=reject.transfer,
            failure=reject.failure,
            retry_after_s=reject.retry_after_s or self._retry_after_s(),
        )
        self.num_rejections[reject.failure.code] += 1
        self._spans.rejected(reject.transfer, reject.failure, self._clock())
        reply(rejection)

    def _place(
        self,
        asker: _Asker,
        waiting: Waiting,
        prefill: Endpoint | None,
        decode: Endpoint,
        explanation: Explanation | None,
    ) -> None:
        now_s = self._clock()
        holding = Holding(
            transfer=waiting.transfer,
            prefill=(prefill or decode).worker,
            decode=decode.worker,
            prompt_tokens=waiting.prompt_tokens,
            max_new_tokens=waiting.max_new_tokens,
            num_choices=waiting.num_choices,
            tenant=waiting.tenant,
            model=self.model,
        )
        cached = explanation.candidates[0].cached_tokens if explanation is not None else 0
        if waiting.transfer.attempt == 1:
            self.roles.placed(waiting, cached, now_s=now_s)
        self.cluster.hold(
            asker.gateway,
            holding,
            now_s=now_s,
            cached_tokens=cached,
            block_hashes=waiting.block_hashes,
        )
        placement = Placement(
            transfer=waiting.transfer,
            prefill=prefill,
            decode=decode,
            queue_s=now_s - waiting.enqueued_s,
            ticket=self._ticket(waiting, prefill, decode),
            explanation=explanation,
        )
        self._spans.placed(placement, len(self._queue), now_s)
        if not asker.explain:
            placement = replace(placement, explanation=None)
        asker.reply(placement)
