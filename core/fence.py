"""Whose commands a process obeys: those of the leader with the highest token that it has seen."""

from core.errors import StaleLeader


class Fence:
    """The highest token seen so far. One per process, shared by all that hear of leaders."""

    def __init__(self) -> None:
        self.token = 0
        # Commands, and streams, of leaders of lower tokens.
        self.num_refused = 0

    def admit(self, token: int) -> None:
        """A genuine leader spoke under this token. Raises StaleLeader where another came since."""
        if token < self.token:
            self.num_refused += 1
            raise StaleLeader(f"leader {token} was replaced by leader {self.token}")
        self.token = token
