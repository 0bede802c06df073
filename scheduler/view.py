"""What the policy decides on: the cluster, its workers and the waiting requests, as plain data.

Stable for whoever runs the policy without the service: the fields of `WorkerView`, `ClusterView`
and `Waiting`, of which all that come with a default may be left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

from core.messages import Compatibility, Endpoint, Holding, StepCost, TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the operator wants of the policy; see `core.config.SchedulerConfig`."""

    local_prefill: Literal["auto", "never", "always"] = "auto"
    reserve_answer_tokens: int = 256

    def reserved_blocks(self, worker: "WorkerView", request: "Waiting | Holding") -> int:
        """Blocks that a decode worker keeps at first; it preempts where answers outgrow them.

        Few answers are as long as they may be: room for the longest would keep most of a pool idle.
        Several answers share the prompt's blocks but the last one. Never more than the pool has:
        answers that do not fit beside each other are given one after the other.
        """
        answer_tokens = min(request.max_new_tokens, self.reserve_answer_tokens)
        one = worker.blocks_for(request.prompt_tokens + answer_tokens)
        shared = (request.prompt_tokens - 1) // worker.compatibility.block_size
        needed = one + (request.num_choices - 1) * (one - shared)
        return needed if one > worker.num_blocks else min(needed, worker.num_blocks)

    def reserved_seqs(self, worker: "WorkerView", request: "Waiting | Holding") -> int:
        """Of the sequences that one step of the worker takes, those that the request needs."""
        return min(request.num_choices, worker.max_seqs)


class Prefixes(Protocol):
    """Who holds which blocks. `scheduler.prefixes.PrefixIndex` is the real one."""

    def match(self, block_hashes: Sequence[int]) -> Mapping[str, int]:
        """By worker, how many of these blocks it holds in a row from the first; none: left out."""
        ...


class NoPrefixes:
    """Nobody holds anything."""

    def match(self, block_hashes: Sequence[int]) -> Mapping[str, int]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker, as the scheduler believes it to be. Blocks and tokens are what is left free."""

    endpoint: Endpoint
    compatibility: Compatibility
    num_blocks: int
    num_free_blocks: int
    max_seqs: int
    num_seqs: int
    max_step_tokens: int
    # Prompt tokens placed here that are not read yet.
    backlog_tokens: int = 0
    # When they are expected to be read, on the scheduler's clock; None: judged by their number.
    busy_until_s: float | None = None
    # The same two of tenants that hold no more than their share, whose prompts it reads first.
    guest_backlog_tokens: int = 0
    guest_busy_until_s: float = 0.0
    # By how much longer than expected its prompts have taken.
    pace: float = 1.0
    # How fast it reads prompts; a decode worker: beside its decode steps. 0: not known yet.
    prefill_tokens_per_s: float = 0.0
    # A decode worker that can read prompts itself.
    local_prefill: bool = False
    # Sequences of a decode worker that lost their blocks to others and wait for new ones.
    num_preempted: int = 0
    # Mean time of a recent step. 0: not known yet.
    step_s: float = 0.0
    # What a step costs here; None: not known yet.
    cost: StepCost | None = None
    # How fast a prefill worker's KV blocks leave it. 0: not known yet.
    link_bytes_per_s: float = 0.0
    # Derived, since the policy asks for them at every placement.
    name: str = field(init=False, repr=False, compare=False)
    block_size: int = field(init=False, repr=False, compare=False)
    # Of one more answer.
    lateness_s: float = field(init=False, repr=False, compare=False)
    # Of reading prompts: for each step, each token (0: not known yet), and each pair of tokens.
    read_step_s: float = field(init=False, repr=False, compare=False)
    read_token_s: float = field(init=False, repr=False, compare=False)
    read_pair_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.endpoint.worker))
        object.__setattr__(self, "block_size", self.compatibility.block_size)
        object.__setattr__(self, "lateness_s", self.decode_lateness_s(1))
        cost, speed = self.cost, self.prefill_tokens_per_s
        step_s, token_s, pair_s = 0.0, 1.0 / speed if speed else 0.0, 0.0
        if cost is not None and cost.token_s > 0:
            pair_s = cost.pair_s
            # A decode worker reads beside its decode steps, as fast as its pacer lets it.
            if not (self.local_prefill and speed):
                step_s, token_s = cost.base_s, cost.token_s
        object.__setattr__(self, "read_step_s", step_s)
        object.__setattr__(self, "read_token_s", token_s)
        object.__setattr__(self, "read_pair_s", pair_s)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def decode_lateness_s(self, num_choices: int) -> float:
        """Time between a new answer's tokens, and by how much it slows those beside it, summed."""
        cost, beside = self.cost, self.num_seqs
        if cost is None:
            return self.step_s
        own_s = cost.base_s + cost.decode_s * (beside + num_choices)
        return own_s + beside * num_choices * cost.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of the pools; 0: nothing yet."""

    # Prompt tokens per second of the fastest: what one that has read none yet is taken for.
    prefill_speed: float = 0.0
    reader_speed: float = 0.0
    # A mean decode worker's.
    step_s: float = 0.0

    @classmethod
    def of(cls, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> "Measured":
        steps = [worker.step_s for worker in decodes if worker.step_s > 0]
        return cls(
            prefill_speed=max((each.prefill_tokens_per_s for each in prefills), default=0.0),
            reader_speed=max(
                (each.prefill_tokens_per_s for each in decodes if each.local_prefill), default=0.0
            ),
            step_s=sum(steps) / len(steps) if steps else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The workers that may be given work, by role, and what was measured of them together."""

    prefills: tuple[WorkerView, ...] = ()
    decodes: tuple[WorkerView, ...] = ()
    rules: Rules = Rules()
    prefixes: Prefixes = field(default_factory=NoPrefixes)
    # Tokens of a mean answer. 0: not known yet, then what the rules reserve.
    answer_tokens: float = 0.0
    # Work that leaves the queue per second while one is there, in units of `Waiting.cost`. 0: not
    # known yet, and nobody is refused for what waits before it.
    drain_per_s: float = 0.0
    # Tenants that hold more than their share of what runs while there are others: they leave some
    # room free for those.
    greedy: frozenset[str] = frozenset()
    # None: worked out where it is needed.
    pools: Measured | None = None
    # Requests that may be placed now, whatever room there is. None: as many as there is room for.
    max_placements: int | None = None

    @property
    def measured(self) -> Measured:
        """What was measured of the pools."""
        return self.pools or Measured.of(self.prefills, self.decodes)

    @property
    def readers(self) -> tuple[WorkerView, ...]:
        """The decode workers that may be given prompts to read."""
        if self.rules.local_prefill == "never":
            return ()
        return tuple(worker for worker in self.decodes if worker.local_prefill)

    @property
    def pairing_prefills(self) -> tuple[WorkerView, ...]:
        """The prefill workers that may be given prompts."""
        if self.rules.local_prefill == "always" and self.readers:
            return ()
        return self.prefills

    def expected_answer_tokens(self, request: "Waiting | Holding") -> float:
        """Tokens of one answer, as far as one can tell."""
        mean = self.answer_tokens or self.rules.reserve_answer_tokens
        return max(1.0, min(request.max_new_tokens, mean))

    def without(self, names: frozenset[str]) -> "ClusterView":
        """The view without these workers."""
        if not names:
            return self
        return replace(
            self,
            prefills=tuple(worker for worker in self.prefills if worker.name not in names),
            decodes=tuple(worker for worker in self.decodes if worker.name not in names),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One request of the queue. Times are on the scheduler's own clock."""

    transfer: TransferId
    prompt_tokens: int
    max_new_tokens: int
    deadline_s: float
    num_choices: int = 1
    # Lives of workers that an earlier attempt was lost with, and until when they are left out. One
    # that is still registered by then was not lost.
    excluded: frozenset[str] = frozenset()
    excluded_until_s: float = 0.0
    enqueued_s: float = 0.0
    tenant: str = ""
    # The lower, the earlier.
    priority: int = 0
    # Of the prompt's first blocks; see `core.block_hash.short`.
    block_hashes: tuple[int, ...] = field(default=(), repr=False)
    # What its tenant is charged: prompt tokens, and block-seconds of its answers.
    cost: float = 0.0


def charge_prefill(
    worker: WorkerView,
    prompt_tokens: int,
    *,
    busy_until_s: float | None = None,
    guest_busy_until_s: float | None = None,
) -> WorkerView:
    """The prefill worker with one more prompt to read."""
    return _loaded(
        worker,
        blocks=worker.blocks_for(prompt_tokens),
        seqs=1,
        unread_tokens=prompt_tokens,
        busy_until_s=busy_until_s,
        guest_busy_until_s=guest_busy_until_s,
    )


def charge_decode(
    worker: WorkerView,
    rules: Rules,
    request: Waiting | Holding,
    *,
    unread_tokens: int = 0,
    busy_until_s: float | None = None,
    guest_busy_until_s: float | None = None,
) -> WorkerView:
    """The decode worker with one more request, of which it reads some tokens itself."""
    return _loaded(
        worker,
        blocks=rules.reserved_blocks(worker, request),
        seqs=rules.reserved_seqs(worker, request),
        unread_tokens=unread_tokens,
        busy_until_s=busy_until_s,
        guest_busy_until_s=guest_busy_until_s,
    )


def _loaded(
    worker: WorkerView,
    *,
    blocks: int,
    seqs: int,
    unread_tokens: int,
    busy_until_s: float | None,
    guest_busy_until_s: float | None,
) -> WorkerView:
    """The worker with so much more on it. Copies slots: `replace` costs three times as much."""
    made = object.__new__(WorkerView)
    put = object.__setattr__
    for name in _SLOTS:
        put(made, name, getattr(worker, name))
    put(made, "num_free_blocks", worker.num_free_blocks - blocks)
    put(made, "num_seqs", worker.num_seqs + seqs)
    put(made, "backlog_tokens", worker.backlog_tokens + unread_tokens)
    if busy_until_s is not None:
        put(made, "busy_until_s", busy_until_s)
    if guest_busy_until_s is not None:
        put(made, "guest_backlog_tokens", worker.guest_backlog_tokens + unread_tokens)
        put(made, "guest_busy_until_s", guest_busy_until_s)
    put(made, "lateness_s", made.decode_lateness_s(1))
    return made


_SLOTS = tuple(each.name for each in fields(WorkerView))
