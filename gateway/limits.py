"""How much a caller may use: token buckets of requests and tokens per minute.

A bucket holds one minute's worth, so a caller that was quiet may use that much at once. Requests
and prompt tokens are taken before a request is queued, or it is refused. Completion tokens are not
known then, and to reserve `max_tokens` would refuse most requests for tokens they never write: they
are spent as they come. A bucket may fall below zero by that, and admits nothing until it is filled
again, so the rate holds over time.
"""

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import RateLimited

_MINUTE_S = 60.0
Clock = Callable[[], float]


class Resource(enum.StrEnum):
    """What a quota counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A bound on one key or one tenant. `subject` names it, such as `tenant acme`."""

    subject: str
    resource: Resource
    per_minute: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What is left of a quota now, and the seconds until it is whole again."""

    quota: Quota
    remaining: int
    reset_s: float


class QuotaStore(Protocol):
    """Where the buckets are. Several gateways share quotas where they share a store."""

    async def take(self, quotas: Sequence[Quota], amount: int) -> tuple[Allowance, ...]:
        """Takes the amount from all of them, or raises RateLimited and takes from none."""
        ...

    def spend(self, quotas: Sequence[Quota], amount: int) -> None:
        """Takes what was used already; a negative amount gives back. Never refuses."""
        ...


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float

    def refill(self, quota: Quota, now_s: float) -> float:
        grown = (now_s - self.at_s) * quota.per_minute / _MINUTE_S
        self.level = min(self.level + grown, quota.per_minute)
        self.at_s = now_s
        return self.level


class MemoryQuotas:
    """The buckets of this gateway alone. Implements QuotaStore.

    It holds a bucket for each quota of the keys' file that was ever used, no more.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, Resource], _Bucket] = {}

    async def take(self, quotas: Sequence[Quota], amount: int) -> tuple[Allowance, ...]:
        """See QuotaStore.take."""
        now_s = self._clock()
        buckets = [self._bucket(quota, now_s) for quota in quotas]
        levels = [(quota, bucket.level) for quota, bucket in zip(quotas, buckets, strict=True)]
        allowances = admitted(levels, amount)
        for bucket in buckets:
            bucket.level -= amount
        return allowances

    def spend(self, quotas: Sequence[Quota], amount: int) -> None:
        """See QuotaStore.spend."""
        now_s = self._clock()
        for quota in quotas:
            bucket = self._bucket(quota, now_s)
            bucket.level = min(bucket.level - amount, quota.per_minute)

    def adopt(self, quota: Quota, level: float) -> None:
        """The quota's level, as another store has it."""
        self._bucket(quota, self._clock()).level = level

    def _bucket(self, quota: Quota, now_s: float) -> _Bucket:
        key = (quota.subject, quota.resource)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(float(quota.per_minute), now_s)
        bucket.refill(quota, now_s)
        return bucket


def admitted(levels: Sequence[tuple[Quota, float]], amount: int) -> tuple[Allowance, ...]:
    """What is left once the amount is taken from these levels. Raises RateLimited."""
    if lacking := [(quota, level) for quota, level in levels if level < amount]:
        raise refusal(amount, lacking)
    return tuple(
        Allowance(
            quota=quota,
            remaining=max(0, math.floor(level - amount)),
            reset_s=(quota.per_minute - level + amount) * _MINUTE_S / quota.per_minute,
        )
        for quota, level in levels
    )


def refusal(amount: int, lacking: Sequence[tuple[Quota, float]]) -> RateLimited:
    """The error for quotas whose levels are below the amount: the one that takes longest."""
    quota, level = max(lacking, key=lambda each: _wait_s(amount, *each))
    wait_s = _wait_s(amount, quota, level)
    bound = f"{quota.subject} may use {quota.per_minute} {quota.resource} a minute"
    if math.isinf(wait_s):
        why = f"{bound}, and this request alone needs {amount}"
        return RateLimited(why, quota=quota.subject, resource=quota.resource, retry_after_s=None)
    why = f"{bound}, and they are used up; retry in {math.ceil(wait_s)} s"
    return RateLimited(why, quota=quota.subject, resource=quota.resource, retry_after_s=wait_s)


def _wait_s(amount: int, quota: Quota, level: float) -> float:
    """Until the bucket holds the amount; infinite where it never will."""
    if amount > quota.per_minute:
        return math.inf
    return max(0.0, (amount - level) * _MINUTE_S / quota.per_minute)
