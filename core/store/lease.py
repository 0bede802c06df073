"""The leader's lease: one scheduler holds it, under a token that only grows.

A token is never given out twice, so of two schedulers that both believe they lead, whoever obeys
the higher token obeys one: Martin Kleppmann's fencing tokens, "How to do distributed locking"
(2016). `docs/adr/0008-tokens-fence-leaders.md` says what that is worth when the store is lost.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# A larger one is no token that this software made: scripts in Redis count in doubles.
MAX_TOKEN = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheduler in one of its lives: its gRPC target, and host:port of its admin server."""

    holder: str
    address: str
    admin_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who leads, under which token."""

    token: int
    leader: Candidate


class LeaseStore(Protocol):
    """Where the one lease is. Every call raises StoreAway where the store does not answer."""

    async def take(self, candidate: Candidate, *, at_least: int, ttl_s: float) -> Lease:
        """Takes the lease where it is free, renews it where it is the candidate's own.

        Gives the lease as it then stands, which may be another's. One that was free gets a token
        above every earlier one and above `at_least`; so does one's own of a token below that.
        """
        ...

    async def read(self) -> Lease | None:
        """The lease as it stands; None where nobody holds it."""
        ...

    async def release(self, candidate: Candidate) -> None:
        """Frees the lease where it is the candidate's own."""
        ...


class MemoryLeases:
    """The lease of one process, or of several schedulers in one. Implements LeaseStore."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lease: Lease | None = None
        self._ends_s = 0.0
        self._last_token = 0

    async def take(self, candidate: Candidate, *, at_least: int, ttl_s: float) -> Lease:
        """See LeaseStore.take."""
        lease = await self.read()
        if lease is not None and lease.leader.holder != candidate.holder:
            return lease
        if lease is None or lease.token < at_least:
            self._last_token = max(self._last_token, at_least) + 1
            lease = Lease(token=self._last_token, leader=candidate)
        self._lease, self._ends_s = lease, self._clock() + ttl_s
        return lease

    async def read(self) -> Lease | None:
        """See LeaseStore.read."""
        return self._lease if self._clock() < self._ends_s else None

    async def release(self, candidate: Candidate) -> None:
        """See LeaseStore.release."""
        if self._lease is not None and self._lease.leader.holder == candidate.holder:
            self._lease = None
