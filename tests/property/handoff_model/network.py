"""The control side of the model: ordered streams that break, and whose ends learn of it apart."""

import enum
from collections import deque
from dataclasses import dataclass

from core.messages import TransferId, WorkerRef


class Violation(AssertionError):
    """A promise of the hand-off does not hold."""


class Kind(enum.Enum):
    """The messages of a hand-off stream, by the names they have in `core.messages`."""

    HELLO = "hello"
    PREFILL = "prefill"
    CANCEL = "cancel"
    ADOPTED = "adopted"
    WELCOME = "welcome"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    CHUNK = "chunk"
    COMMIT = "commit"
    QUIESCED = "quiesced"


TO_PREFILL = frozenset({Kind.HELLO, Kind.PREFILL, Kind.CANCEL, Kind.ADOPTED})

# What a block of the model holds: whose it is and which. Anything else is the wrong content.
Content = tuple[TransferId | str, int]


@dataclass(frozen=True, slots=True)
class Message:
    """One message; fields that its kind does not have stay empty."""

    kind: Kind
    transfer: TransferId | None = None
    # A Prefill's ticket names both workers in their present lives.
    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    block_ids: tuple[int, ...] = ()
    digests: tuple[object, ...] = ()
    ended: bool = False


class Stream:
    """One hand-off stream between a life of a decode worker and one of a prefill worker.

    What was said before the break may still arrive, in order, until the reading end notices it.
    """

    def __init__(self, decode, prefill, one_sided):
        self.decode = decode
        self.prefill = prefill
        self.one_sided = one_sided
        self.to_prefill: deque[Message] = deque()
        self.to_decode: deque[Message] = deque()
        self.broken = False
        self.stalled = False
        self.retired = False  # the prefill worker says nothing more, and soon ends it
        self.decode_up = True
        self.prefill_up = prefill.alive
        self.welcomed = False  # as the decode worker knows it
        self.peer = None  # as the prefill worker knows it
        if not prefill.alive:
            self.broken = True

    def ask(self, message):
        """The decode worker says something; False where it knows that nobody will hear."""
        if self.decode_up and not self.broken and self.prefill_up:
            self.to_prefill.append(message)
        return self.decode_up

    def answer(self, message):
        """The prefill worker says something."""
        if self.prefill_up and not self.broken and not self.retired and self.decode_up:
            self.to_decode.append(message)

    def retire(self):
        """The prefill worker ends the stream after what it has said."""
        self.retired = True
