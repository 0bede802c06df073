"""Which streams a scheduler serves: all of them while it leads, none while it stands by."""

from collections.abc import Callable
from typing import Any

from core.fence import Fence
from core.messages import Standby, Welcome, WorkerRef
from core.store.lease import Lease
from core.stream import Outbox


class Leadership:
    """Answers each hello, and tells every stream when it is over with leading.

    `fence` has the token under which it leads: with it the desk's tickets are signed. A scheduler
    that nobody else can replace leads from the start, under 0.
    """

    def __init__(self, me: WorkerRef, fence: Fence | None = None, *, leads: bool = True) -> None:
        self._me = me
        self._fence = fence or Fence()
        self.leads = leads
        # Who leads instead, where that is known.
        self.leader: Lease | None = None
        # Hears of each token of a leader that a gateway or a worker has seen.
        self.on_heard: Callable[[int], None] = lambda token: None
        self._streams: set[Outbox[Any]] = set()

    @property
    def token(self) -> int:
        """Under which it leads; 0 where it stands by, or nobody else could lead."""
        return self._fence.token if self.leads else 0

    def greets(self, outbox: Outbox[Any], leader_token: int) -> bool:
        """Answers a hello. False where the stream ends with the answer: we do not lead."""
        self.on_heard(leader_token)
        outbox.send(self._word())
        if self.leads:
            self._streams.add(outbox)
        else:
            outbox.close()
        return self.leads

    def left(self, outbox: Outbox[Any]) -> None:
        """A stream ended. Idempotent."""
        self._streams.discard(outbox)

    def begin(self, token: int) -> None:
        """It leads under this token from now on."""
        self._fence.admit(token)
        self.leads, self.leader = True, None
        for outbox in self._streams:
            outbox.send(self._word())

    def end(self, leader: Lease | None) -> None:
        """It stands by from now on; its clients are sent away."""
        self.leads, self.leader = False, leader
        for outbox in self._streams:
            outbox.send(self._word())
            outbox.close()
        self._streams.clear()

    def _word(self) -> Welcome | Standby:
        if self.leads:
            return Welcome(scheduler=str(self._me), leader_token=self.token)
        if self.leader is None:
            return Standby()
        return Standby(leader_address=self.leader.leader.address, leader_token=self.leader.token)
