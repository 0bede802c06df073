"""What the scheduler knows of workers and of what is placed on them. All of it soft state.

What a placement takes is charged to its workers when it is made and given back when it ends, so
that a view costs what has changed since the last one, and not the number of placements.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from core.messages import (
    CacheNews,
    Compatibility,
    HandOver,
    Holding,
    TransferId,
    Turn,
    WorkerHello,
    WorkerLoad,
    WorkerRole,
)
from scheduler.cost import read_s
from scheduler.measures import AnswerLength, LinkSpeed, Pace
from scheduler.prefixes import PrefixIndex
from scheduler.view import ClusterView, Measured, Rules, WorkerView


def _nobody_hears(command: Turn | HandOver) -> object:
    """The worker has no stream, as where the policy is run without the service."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A prompt that a worker is yet to read. `guest`: its tenant held no more than its share."""

    tokens: int
    takes_s: float
    guest: bool


@dataclass(slots=True, eq=False)
class Member:
    """A registered worker, and what is placed on it."""

    hello: WorkerHello
    key: str
    load: WorkerLoad | None = None
    link: LinkSpeed = field(default_factory=LinkSpeed)
    # Charged: blocks, sequences, and prompts that are not read yet, each with its seconds.
    num_blocks: int = 0
    num_seqs: int = 0
    unread: dict[TransferId, Unread] = field(default_factory=dict)
    backlog_tokens: int = 0
    busy_until_s: float = 0.0
    # The same two of those that are guests.
    guest_backlog_tokens: int = 0
    guest_busy_until_s: float = 0.0
    pace: Pace = field(default_factory=Pace)
    # Blocks of placements since the last report: they are not in it.
    unreported: dict[TransferId, int] = field(default_factory=dict)
    # None: something changed since it was made.
    view: WorkerView | None = None
    # Says something to the worker.
    tell: Callable[[Turn | HandOver], object] = _nobody_hears
    # It is leaving, and was told that its peers take what it holds.
    hands_over: bool = False
    # The role that it was told to turn to and does not serve yet, and when.
    told: WorkerRole | None = None
    told_s: float = 0.0

    @property
    def takes_work(self) -> bool:
        """Whether anything may be placed on it."""
        return self.load is not None and not self.load.draining and self.told is None

    def charged_view(self) -> WorkerView:
        """What is free: capacity less what is charged, and less blocks that are in quarantine.

        Placements are counted here and not from reports, which lag behind. Only where answers
        outgrew what was reserved for them does a decode worker's report say less.
        """
        hello, load = self.hello, self.load
        free = hello.num_blocks - self.num_blocks
        if load is not None:
            free -= load.blocks.quarantined
            if hello.role is WorkerRole.DECODE:
                reported = load.blocks.free + load.blocks.cached
                free = min(free, reported - sum(self.unreported.values()))
        return WorkerView(
            endpoint=hello.endpoint,
            compatibility=hello.compatibility,
            num_blocks=hello.num_blocks,
            num_free_blocks=free,
            max_seqs=hello.max_seqs,
            num_seqs=self.num_seqs,
            max_step_tokens=hello.max_step_tokens,
            backlog_tokens=self.backlog_tokens,
            busy_until_s=self.busy_until_s if self.unread else 0.0,
            guest_backlog_tokens=self.guest_backlog_tokens,
            guest_busy_until_s=self.guest_busy_until_s if self.guest_backlog_tokens else 0.0,
            pace=self.pace.factor,
            prefill_tokens_per_s=load.prefill_tokens_per_s if load else 0.0,
            local_prefill=hello.local_prefill,
            num_preempted=load.num_preempted if load else 0,
            step_s=load.step_s if load else 0.0,
            cost=load.cost if load else None,
            link_bytes_per_s=self.link.bytes_per_s,
        )


@dataclass(slots=True)
class Held:
    """A placement that still holds something, and what it was charged."""

    holding: Holding
    gateway: str
    # When it was placed, and seconds that its reader was to take by what steps cost there.
    placed_s: float = 0.0
    expected_s: float = 0.0
    prefilled_s: float | None = None
    # (member, blocks, sequences): what was charged to whom.
    decode: tuple[Member, int, int] | None = None
    reader: tuple[Member, int, int] | None = None


class Cluster:
    """The members and the holdings; gives the view that the policy decides on."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.members: dict[str, Member] = {}
        self.held: dict[TransferId, Held] = {}
        self.prefixes = PrefixIndex()
        self.answers = AnswerLength()
        # Answers that each tenant has running.
        self.num_running: dict[str, int] = {}
        # Tenants that held more than their share at the last view.
        self._greedy: frozenset[str] = frozenset()
        self._kinds: dict[Compatibility, Compatibility] = {}
        # None: to be worked out again.
        self._measured: Measured | None = None

    def join(self, hello: WorkerHello, *, now_s: float = 0.0) -> Member:
        """A worker says hello. An earlier life or stream of it is forgotten."""
        worker = hello.endpoint.worker
        for member in list(self.members.values()):
            if member.hello.endpoint.worker.name == worker.name:
                self._forget(member)
        # One object for all that are equal, so that comparing them costs nothing.
        kind = self._kinds.setdefault(hello.compatibility, hello.compatibility)
        member = Member(replace(hello, compatibility=kind), str(worker))
        self.members[member.key] = member
        self.members = dict(sorted(self.members.items()))
        self.prefixes.join(member.key)
        for held in self.held.values():
            self._charge(held, now_s)
        return member

    def leave(self, member: Member) -> bool:
        """A worker's stream ended. False where another stream of it has come since."""
        if self.members.get(member.key) is not member:
            return False
        self._forget(member)
        return True

    def _forget(self, member: Member) -> None:
        del self.members[member.key]
        self._measured = None
        self.prefixes.leave(member.key)
        for held in self.held.values():
            if held.decode is not None and held.decode[0] is member:
                held.decode = None
            if held.reader is not None and held.reader[0] is member:
                held.reader = None

    def view(
        self, *, drain_per_s: float = 0.0, greedy: frozenset[str] = frozenset()
    ) -> ClusterView:
        """What the policy decides on; the queue's speed and who is greedy are the desk's to say."""
        self._greedy = greedy
        prefills: list[WorkerView] = []
        decodes: list[WorkerView] = []
        for member in self.members.values():
            if not member.takes_work:
                continue
            pool = prefills if member.hello.role is WorkerRole.PREFILL else decodes
            pool.append(member.view or self.view_of(member))
        if self._measured is None:
            self._measured = Measured.of(prefills, decodes)
        return ClusterView(
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            rules=self._rules,
            prefixes=self.prefixes,
            answer_tokens=self.answers.tokens,
            drain_per_s=drain_per_s,
            greedy=greedy,
            pools=self._measured,
        )

    def reports(self, member: Member, load: WorkerLoad) -> None:
        """A worker says how it is loaded."""
        member.load = load
        self._measured = None
        member.unreported.clear()
        member.view = None
        if member.hello.role is WorkerRole.PREFILL:
            member.link.observe(load.counters)

    def cache_news(self, member: Member, news: CacheNews) -> None:
        """A worker says what its prefix cache has gained and lost."""
        if self.members.get(member.key) is member:
            self.prefixes.report(member.key, news)

    def hold(
        self,
        gateway: str,
        holding: Holding,
        *,
        now_s: float = 0.0,
        cached_tokens: int = 0,
        block_hashes: tuple[int, ...] = (),
    ) -> None:
        """Counts a placement. Its reader has `cached_tokens` of the prompt already."""
        self.settle(holding.transfer)
        held = self.held[holding.transfer] = Held(holding, gateway)
        tenant, num = holding.tenant, holding.num_choices
        self.num_running[tenant] = self.num_running.get(tenant, 0) + num
        self._charge(held, now_s, cached_tokens)
        for worker in {str(holding.decode), str(holding.prefill or holding.decode)}:
            self.prefixes.hope(worker, block_hashes, now_s=now_s)

    def prefilled(self, transfer: TransferId, *, now_s: float = 0.0) -> None:
        """The prompt's share of a placement is free again. Idempotent."""
        held = self.held.get(transfer)
        if held is None or held.holding.prefill is None:
            return
        if held.reader is not None:
            held.reader[0].pace.observe(held.placed_s, held.expected_s, now_s)
        held.holding = replace(held.holding, prefill=None)
        held.prefilled_s = now_s
        self._release_reader(held, now_s)

    def settle(self, transfer: TransferId, *, now_s: float | None = None) -> None:
        """All of a placement is free again. Idempotent.

        With `now_s` it came to its end in the usual way, and its length is learned.
        """
        held = self.held.pop(transfer, None)
        if held is None:
            return
        self._release_reader(held, now_s or 0.0)
        tenant = held.holding.tenant
        self.num_running[tenant] -= held.holding.num_choices
        if not self.num_running[tenant]:
            del self.num_running[tenant]
        if held.decode is not None:
            member, blocks, seqs = held.decode
            member.num_blocks -= blocks
            member.num_seqs -= seqs
            member.unreported.pop(transfer, None)
            member.view = None
            if now_s is not None and held.prefilled_s is not None and member.load is not None:
                self.answers.observe(now_s - held.prefilled_s, member.load.step_s)

    def drop_gateway(self, gateway: str) -> None:
        """A gateway's stream ended: its decode workers notice as well and free what it held."""
        for transfer in [key for key, held in self.held.items() if held.gateway == gateway]:
            self.settle(transfer)

    # --- charges -------------------------------------------------------------------------------

    def _charge(self, held: Held, now_s: float, cached_tokens: int = 0) -> None:
        """Charges a placement to those of its workers that are here and were not charged yet."""
        holding = held.holding
        if held.decode is None and (member := self.members.get(str(holding.decode))) is not None:
            view = self.view_of(member)
            blocks = self._rules.reserved_blocks(view, holding)
            seqs = self._rules.reserved_seqs(view, holding)
            held.decode = (member, blocks, seqs)
            member.num_blocks += blocks
            member.num_seqs += seqs
            member.unreported[holding.transfer] = blocks
            member.view = None
        if held.reader is not None or holding.prefill is None:
            return
        member = self.members.get(str(holding.prefill))
        if member is None:
            return
        local = holding.prefill == holding.decode
        view = self.view_of(member)
        blocks, seqs = (0, 0) if local else (view.blocks_for(holding.prompt_tokens), 1)
        held.reader = (member, blocks, seqs)
        member.num_blocks += blocks
        member.num_seqs += seqs
        best = view.prefill_tokens_per_s or self._speed_beside(member)
        held.placed_s = now_s
        held.expected_s = read_s(view, holding.prompt_tokens, cached_tokens, best)
        takes_s = held.expected_s * member.pace.factor
        guest = holding.tenant not in self._greedy
        member.unread[holding.transfer] = Unread(holding.prompt_tokens, takes_s, guest)
        member.backlog_tokens += holding.prompt_tokens
        member.busy_until_s = max(member.busy_until_s, now_s) + takes_s
        if guest:
            member.guest_backlog_tokens += holding.prompt_tokens
            member.guest_busy_until_s = max(member.guest_busy_until_s, now_s) + takes_s
        member.view = None

    def view_of(self, member: Member) -> WorkerView:
        """What is free on one member."""
        if member.view is None:
            member.view = member.charged_view()
        return member.view

    def _speed_beside(self, member: Member) -> float:
        """The best speed of the member's role, for where it has none of its own."""
        role = member.hello.role
        return max(
            (
                each.load.prefill_tokens_per_s
                for each in self.members.values()
                if each.load is not None and each.hello.role is role
            ),
            default=0.0,
        )

    def _release_reader(self, held: Held, now_s: float) -> None:
        if held.reader is None:
            return
        member, blocks, seqs = held.reader
        held.reader = None
        read = member.unread.pop(held.holding.transfer)
        member.num_blocks -= blocks
        member.num_seqs -= seqs
        member.backlog_tokens -= read.tokens
        if read.guest:
            member.guest_backlog_tokens -= read.tokens
        # Never more than what is left; where the worker is late, all of that from now on.
        left_s = guests_s = 0.0
        for each in member.unread.values():
            left_s += each.takes_s
            guests_s += each.takes_s if each.guest else 0.0
        if not now_s <= member.busy_until_s <= now_s + left_s:
            member.busy_until_s = now_s + left_s
        if not now_s <= member.guest_busy_until_s <= now_s + guests_s:
            member.guest_busy_until_s = now_s + guests_s
        member.view = None
