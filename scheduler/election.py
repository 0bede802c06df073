"""Whether this scheduler leads: it holds the lease, or stands by until it can.

What a lost store means (`docs/adr/0008-tokens-fence-leaders.md`): who leads goes on leading, since
nobody else can take the lease either, and where that is wrong, the other's token is higher. Who
stands by does not begin to lead without the lease, unless no other scheduler is configured.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from core.errors import StoreAway
from core.store.lease import Candidate, Lease, LeaseStore

# Of the lease's lifetime: a leader renews four times in it, and a standby looks eight times.
_RENEW_SHARE = 0.25
_LOOK_SHARE = 0.125


class Election:
    """Owns the candidacy of one scheduler. `alone`: no other one is configured.

    `on_term` hears of each change: of the token where it leads under another one than before, of 0
    where it stands by.
    """

    def __init__(
        self,
        store: LeaseStore,
        me: Candidate,
        *,
        lease_s: float,
        alone: bool,
        on_term: Callable[[int], None],
    ) -> None:
        self._store = store
        self._me = me
        self._lease_s = lease_s
        self._alone = alone
        self._on_term = on_term
        # Under which we lead; 0: we stand by.
        self.token = 0
        # The highest that anybody had, as far as we know.
        self._seen = 0
        # Who leads, where it is another.
        self.leader: Lease | None = None
        self.num_terms = 0
        self._now = asyncio.Event()
        self._log = structlog.get_logger()

    @property
    def leads(self) -> bool:
        return self.token > 0

    async def run(self) -> None:
        """Takes, renews and waits for the lease, until cancelled; then frees it."""
        try:
            while True:
                await self.step()
                pause_s = self._lease_s * (_RENEW_SHARE if self.leads else _LOOK_SHARE)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._now.wait()
                self._now.clear()
        finally:
            if self.leads:
                with contextlib.suppress(StoreAway):  # then it ends by itself
                    await self._store.release(self._me)

    async def step(self) -> None:
        """Asks the store once."""
        try:
            lease = await self._store.take(self._me, at_least=self._seen, ttl_s=self._lease_s)
        except StoreAway:
            self._without_store()
            return
        self._seen = max(self._seen, lease.token)
        if lease.leader.holder == self._me.holder:
            self.leader = None
            self._become(lease.token)
        else:
            self.leader = lease
            self._become(0)

    def heard(self, token: int) -> None:
        """A gateway or a worker has seen this token of a leader."""
        if token > max(self._seen, self.token):
            self._seen = token
            self._now.set()

    def _without_store(self) -> None:
        """Nobody can be asked. A token above ours is proof of another leader, or of its past."""
        if self.token and self.token >= self._seen:
            return
        if self._alone:
            self._seen += 1
            self._become(self._seen)
        else:
            self._become(0)

    def _become(self, token: int) -> None:
        if token == self.token:
            return
        self.token = token
        self.num_terms += token > 0
        if token:
            self._log.info("leading", token=token)
        else:
            self._log.warning(
                "standing_by", leader=self.leader.leader.holder if self.leader else ""
            )
        self._on_term(token)
