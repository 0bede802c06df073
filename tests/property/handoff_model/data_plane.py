"""The data side of the model: a peer's writer thread, and its writes that land when they like.

One-sided (shm, nixl, cuda_ipc): a write that began lands at any later time, also while its process
is frozen, unless the process dies first; one that failed may land until its sender is closed.
Receiver-written (tcp, collective): frames arrive in order, also after their sender's death, and are
dropped where the receiver has closed their window.
"""

from collections import deque
from dataclasses import dataclass, field

from handoff_model.network import Content

from core.messages import TransferId


@dataclass(slots=True, eq=False)
class Write:
    """One block on its way."""

    transfer: TransferId
    index: int
    target: int
    value: Content


@dataclass(slots=True, eq=False)
class WriteJob:
    """As `prefill_worker.peer.WriteJob`: some consecutive blocks of one transfer."""

    sending: object
    pairs: list[tuple[int, int, int]]  # index, source, target
    last: bool
    digests: list[object] = field(default_factory=list)
    dropped: bool = False

    @property
    def over(self):
        """Whether no further block of it will be written."""
        return self.dropped or not self.pairs


class Peer:
    """As `prefill_worker.peer.Peer`: one decode worker, its stream, and one thread that writes."""

    def __init__(self, ref, stream):
        self.ref = ref
        self.stream = stream
        self.jobs: deque[WriteJob] = deque()
        self.current: WriteJob | None = None
        self.in_flight: Write | None = None  # one-sided
        self.frames: deque[Write] = deque()  # receiver-written
        self.closing = False
        self.failing = False  # every write from now on fails
        self.unknown: list[Write] = []  # one-sided writes that failed: nobody knows what of them
        self.broken = False  # and so nothing is promised any more
        self.sender_open = True

    @property
    def pending(self):
        """One-sided writes that may still land."""
        return self.unknown if self.in_flight is None else [self.in_flight, *self.unknown]

    def give_up(self):
        """A write failed. Ending the stream tells the peer."""
        self.broken = True
        self.stream.retire()

    def close(self):
        """Jobs that are not begun are cancelled; the one that is begun is waited for."""
        self.closing = True
        cancelled, self.jobs = list(self.jobs), deque()
        return cancelled

    def try_close(self):
        """Lets the peer's memory go once the thread is idle. True where that happened now."""
        if self.closing and self.sender_open and self.current is None:
            self.sender_open = False
            self.unknown.clear()
            return True
        return False
