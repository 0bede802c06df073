"""Where it is kept how far streamed answers have come, so that another gateway can go on.

Of each stream: a head (the request's digest, its seed), and pieces (token ids and ends, in order).
Neither prompt nor text: who resumes brings the request again. A stream has one owner, the gateway
that serves it; who resumes it becomes the owner, and the one before can append nothing more.
"""

import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.messages import StopReason

# What a token id takes as it is written.
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What makes a repeated request the same one: its digest, and what was drawn for it."""

    digest: str
    seed: int
    created_unix_s: int
    num_choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of one choice from `start` on. With `end` the choice is over.

    An end of UNSPECIFIED is a stop string's: the text says where.
    """

    choice: int
    start: int
    token_ids: tuple[int, ...] = field(repr=False)
    end: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """What is added to one stream. `begins`: the stream is made where it is not there."""

    key: str
    owner: str
    head: Head
    pieces: tuple[Piece, ...]
    begins: bool


class Verdict(enum.Enum):
    """What became of an append."""

    KEPT = "kept"
    # The stream is not there any more, and this append does not begin it.
    GONE = "gone"
    # Another gateway owns it.
    TAKEN = "taken"
    # It is longer than is kept of one stream, and is forgotten.
    FULL = "full"
    # The store refused this one.
    REFUSED = "refused"


@dataclass(slots=True)
class Told:
    """The tokens of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    end: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One stream as it is kept."""

    head: Head
    choices: tuple[Told, ...]


def replayed(head: Head, pieces: Sequence[Piece]) -> Kept | None:
    """The stream that these pieces make, some of which may overlap; None where some is missing."""
    choices = tuple(Told() for _ in range(head.num_choices))
    for piece in pieces:
        if not 0 <= piece.choice < len(choices):
            return None
        told = choices[piece.choice]
        if not 0 <= piece.start <= len(told.token_ids):
            return None
        told.token_ids += piece.token_ids[len(told.token_ids) - piece.start :]
        told.end = told.end if piece.end is None else piece.end
    return Kept(head=head, choices=choices)


class JournalStore(Protocol):
    """Raises StoreAway from every call where it does not answer."""

    async def append(self, appends: Sequence[Append]) -> list[Verdict]:
        """Adds to streams, each by itself."""
        ...

    async def find(self, key: str, *, owner: str | None = None) -> Kept | None:
        """The stream; None where there is none. An `owner` owns it from now on."""
        ...


@dataclass(slots=True)
class _Stream:
    owner: str
    head: Head
    ends_s: float
    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0


class MemoryJournals:
    """The streams of this gateway alone: a client that lost its connection finds them here."""

    def __init__(
        self,
        *,
        ttl_s: float,
        max_bytes: int,
        max_streams: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_tokens = max_bytes // TOKEN_BYTES
        self._max_streams = max_streams
        self._clock = clock
        # The one that was written to last is the last.
        self._streams: OrderedDict[str, _Stream] = OrderedDict()

    async def append(self, appends: Sequence[Append]) -> list[Verdict]:
        """See JournalStore.append."""
        now_s = self._clock()
        while self._streams and next(iter(self._streams.values())).ends_s <= now_s:
            self._streams.popitem(last=False)
        return [self._append(each, now_s) for each in appends]

    async def find(self, key: str, *, owner: str | None = None) -> Kept | None:
        """See JournalStore.find."""
        stream = self._streams.get(key)
        if stream is None or stream.ends_s <= self._clock():
            return None
        if owner is not None:
            stream.owner = owner
        return replayed(stream.head, stream.pieces)

    def _append(self, append: Append, now_s: float) -> Verdict:
        stream = self._streams.get(append.key)
        if stream is None:
            if not append.begins:
                return Verdict.GONE
            stream = self._streams[append.key] = _Stream(append.owner, append.head, now_s)
            if len(self._streams) > self._max_streams:
                self._streams.popitem(last=False)
        elif stream.owner != append.owner:
            return Verdict.TAKEN
        stream.num_tokens += sum(len(piece.token_ids) for piece in append.pieces)
        if stream.num_tokens > self._max_tokens:
            del self._streams[append.key]
            return Verdict.FULL
        stream.pieces += append.pieces
        stream.ends_s = now_s + self._ttl_s
        self._streams.move_to_end(append.key)
        return Verdict.KEPT
