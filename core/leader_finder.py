"""Which scheduler a process turns to: the one that is said to lead, else one after the other."""

from collections.abc import Sequence

from core.errors import StaleLeader
from core.fence import Fence
from core.messages import Standby, Welcome
from core.store.lease import Lease

# Between two attempts where there is another scheduler to try: beside the lease's lifetime it is
# what a leader's death costs.
_SEVERAL_PAUSE_S = 0.2
_LONE_PAUSE_S = 1.0


class LeaderFinder:
    """Gives addresses to connect to, and learns from what is said there.

    What is only said of a leader, by a standby or in Redis, is a hint: whom to try next. Obeyed is
    who says so itself, under the highest token.
    """

    def __init__(
        self, addresses: Sequence[str], fence: Fence, *, several: bool | None = None
    ) -> None:
        """One address can stand for `several` schedulers; None: there are as many as addresses."""
        self._addresses = list(addresses)
        self._several = len(self._addresses) > 1 if several is None else several
        self._fence = fence
        self._next = 0
        self._hint: str | None = None
        # Where the last attempt went, and the token of who leads there; 0: nobody has said so.
        self.address = ""
        self._stream_token = 0
        self._welcomed = False

    @property
    def pause_s(self) -> float:
        """The longest pause between two attempts."""
        return _SEVERAL_PAUSE_S if self._several else _LONE_PAUSE_S

    @property
    def leader_token(self) -> int:
        """The highest token seen."""
        return self._fence.token

    @property
    def outdated(self) -> bool:
        """Whether the present stream's leader was replaced, by all that is known."""
        return 0 < self._stream_token < self._fence.token

    @property
    def obeyed(self) -> bool:
        """Whether the scheduler at the other end has shown that it leads."""
        return self._welcomed

    def doubts(self, token: int) -> bool:
        """A leader of this token was refused. True where the present stream goes to it.

        Then another one is tried next.
        """
        if token != self._stream_token or not token:
            return False
        self._hint = None
        return True

    def next_address(self) -> str:
        """Whom to try now. A hint is used once: where it was wrong, the others get their turn."""
        self._stream_token, self._welcomed = 0, False
        if self._hint is not None:
            self.address, self._hint = self._hint, None
        else:
            self.address = self._addresses[self._next % len(self._addresses)]
            self._next += 1
        return self.address

    def welcomed(self, welcome: Welcome) -> bool:
        """Whether the scheduler that said so is to be obeyed."""
        try:
            self._fence.admit(welcome.leader_token)
        except StaleLeader:
            self._welcomed, self._hint = False, None
            return False
        self._welcomed = True
        self._stream_token = welcome.leader_token
        # After a lost connection it is the first to be tried again.
        self._hint = self.address
        return True

    def refused(self, standby: Standby) -> None:
        """The scheduler said that it does not lead."""
        self._hint = None
        if standby.leader_address and standby.leader_token >= self._fence.token:
            self._hint = standby.leader_address

    def heard(self, lease: Lease) -> bool:
        """The lease names a leader. True where the present stream goes to an earlier one."""
        if lease.token < self._fence.token or lease.leader.address == self.address:
            return False
        self._hint = lease.leader.address
        return 0 < self._stream_token < lease.token
