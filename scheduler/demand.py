"""What is asked of the pools: requests as they arrive, in workers' worth of reading and decoding.

Arrivals are counted, not what is served: a pool that is too small serves as much as it can, and
that says nothing of what it lacks. Everything fades, so that a new kind of load is seen in seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.messages import StepCost

_MEMORY_S = 20.0
# Until so much time was seen, a few requests say little of a rate.
_LEAST_SEEN_S = 2.0
# What waits in the queue should be gone within this time.
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Work per time, in workers that it would keep busy all the time."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What arrives per second, and what waits."""

    # Prompt tokens that no prefix cache has; pairs of a token and one that it attends to.
    read_tokens_per_s: float = 0.0
    read_pairs_per_s: float = 0.0
    answer_tokens_per_s: float = 0.0
    answers_per_s: float = 0.0
    # Answers that are being written now, and by how many workers.
    num_decoding: int = 0
    num_decode_workers: int = 0
    # Of a mean request while it decodes.
    held_tokens: float = 0.0
    # Work that waits in the queue, and that arrives, both in units of `Waiting.cost`.
    queued_cost: float = 0.0
    cost_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one worker can do; all of them are taken to be alike."""

    cost: StepCost
    max_step_tokens: int
    max_seqs: int
    # Tokens that its KV pool holds.
    kv_tokens: int
    # Within which time an answer's next token should come. 0: no target.
    step_target_s: float = 0.0


def loads(demand: Demand, capacity: Capacity) -> Loads:
    """The demand in workers' worth. What waits counts as if it arrived while it is to be drained.

    Reading costs what steps cost: each full step its base, each token, each pair. A decode worker
    is full where one more answer would make its steps longer than their target, or would find
    neither a place in the step nor blocks.
    """
    cost = capacity.cost
    steps_per_s = demand.read_tokens_per_s / capacity.max_step_tokens
    reading = (
        steps_per_s * cost.base_s
        + demand.read_tokens_per_s * cost.token_s
        + demand.read_pairs_per_s * cost.pair_s
    )
    most = min(capacity.max_seqs, capacity.kv_tokens / max(1.0, demand.held_tokens))
    spare_s = capacity.step_target_s - cost.base_s
    if spare_s > 0 and cost.decode_s > 0:
        most = min(most, spare_s / cost.decode_s)
    batch = max(1.0, most)
    tokens_per_s = max(demand.answer_tokens_per_s, _made_per_s(demand, cost))
    decoding = tokens_per_s * (cost.base_s / batch + cost.decode_s)
    waiting = 1.0
    if demand.cost_per_s > 0:
        waiting += demand.queued_cost / (_DRAIN_S * demand.cost_per_s)
    return Loads(prefill=reading * waiting, decode=decoding * waiting)


def _made_per_s(demand: Demand, cost: StepCost) -> float:
    """Tokens that are being made now: answers may be longer than those before, and come seldom."""
    if not demand.num_decoding or not demand.num_decode_workers:
        return 0.0
    step_s = cost.base_s + cost.decode_s * demand.num_decoding / demand.num_decode_workers
    return demand.num_decoding / step_s if step_s > 0 else 0.0


class DemandMeter:
    """Counts requests as they arrive; what is long ago fades."""

    def __init__(self) -> None:
        self._arrived = FadingSums(5)  # prompt tokens, pairs, answers, their tokens, cost
        self._placed = FadingSums(2)  # prompt tokens, those of them that were cached

    def arrived(
        self,
        *,
        prompt_tokens: int,
        num_answers: int,
        answer_tokens: float,
        cost: float,
        now_s: float,
    ) -> None:
        """A request came; each of its answers is expected to have so many tokens."""
        pairs = prompt_tokens * prompt_tokens / 2
        amounts = (prompt_tokens, pairs, num_answers, num_answers * answer_tokens, cost)
        self._arrived.add(amounts, now_s)

    def placed(self, *, prompt_tokens: int, cached_tokens: int, now_s: float) -> None:
        """A request was given to workers, which have so much of its prompt already."""
        self._placed.add((prompt_tokens, cached_tokens), now_s)

    def demand(self, now_s: float, *, queued_cost: float = 0.0) -> Demand:
        """What was asked lately, and what waits now."""
        prompt_tokens, pairs, answers, answer_tokens, cost = self._arrived.per_s(now_s)
        placed, cached = self._placed.per_s(now_s)
        unread = 1 - cached / placed if placed > 0 else 1.0
        return Demand(
            read_tokens_per_s=prompt_tokens * unread,
            read_pairs_per_s=pairs * unread,
            answer_tokens_per_s=answer_tokens,
            answers_per_s=answers,
            held_tokens=(prompt_tokens + answer_tokens) / answers if answers > 0 else 0.0,
            queued_cost=queued_cost,
            cost_per_s=cost,
        )


class FadingSums:
    """Sums in which what is old counts less and less, over the time that they stand for."""

    def __init__(self, num_sums: int) -> None:
        self._sums = [0.0] * num_sums
        self._began_s: float | None = None
        self._last_s = 0.0

    def add(self, amounts: Sequence[float], now_s: float) -> None:
        """Adds one amount to each sum."""
        if self._began_s is None:
            self._began_s = self._last_s = now_s
        kept = self._kept(now_s)
        self._sums = [kept * each + new for each, new in zip(self._sums, amounts, strict=True)]
        self._last_s = max(self._last_s, now_s)

    def per_s(self, now_s: float) -> tuple[float, ...]:
        """0 before anything was added."""
        if self._began_s is None:
            return tuple(self._sums)
        seen_s = max(_LEAST_SEEN_S, now_s - self._began_s)
        scale = self._kept(now_s) / (_MEMORY_S * (1 - math.exp(-seen_s / _MEMORY_S)))
        return tuple(scale * each for each in self._sums)

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._last_s) / _MEMORY_S)
