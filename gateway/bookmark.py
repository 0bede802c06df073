"""How far a client has read a streamed answer, as the id of a server-sent event.

`chatcmpl-1f…:12,9e`: of the answer's first choice twelve tokens, of its second nine and its end.
An id stands on the last event of what is written together. So a client that was cut off between
two events of it gets all of it once more, and nothing is ever left out.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Self

from core.errors import InvalidRequest
from gateway.backend import TokenBatch
from gateway.choice_text import TextEvent

HEADER = "last-event-id"
_MAX_CHARS = 2048
_ID = re.compile(r"((?:chatcmpl|cmpl)-[0-9a-f]{32}):([0-9]{1,9}e?(?:,[0-9]{1,9}e?)*)")


@dataclass(frozen=True, slots=True)
class Mark:
    """One choice: tokens that the client has, and whether it has the end."""

    num_tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}{'e' if self.ended else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a client says in Last-Event-ID."""

    request_id: str
    marks: tuple[Mark, ...]

    @classmethod
    def parse(cls, header: str) -> Self:
        """Raises InvalidRequest where it is no id of this server's events."""
        found = _ID.fullmatch(header) if len(header) <= _MAX_CHARS else None
        if found is None:
            raise InvalidRequest("is no id of an event of this server", field="Last-Event-ID")
        marks = tuple(
            Mark(int(mark.rstrip("e")), mark.endswith("e")) for mark in found[2].split(",")
        )
        return cls(request_id=found[1], marks=marks)


class Bookmark:
    """Follows one answer's events from its beginning, to a client that has some of them."""

    def __init__(
        self, request_id: str, created_unix_s: int, *, has: tuple[Mark, ...] | int
    ) -> None:
        """`has` is what the client has, or the number of choices where it has nothing."""
        self.request_id = request_id
        self.created_unix_s = created_unix_s
        # Whether the client has the stream's beginning.
        self.resumes = not isinstance(has, int)
        self._has = (Mark(),) * has if isinstance(has, int) else has
        self._told = [Mark()] * len(self._has)

    @property
    def event_id(self) -> str:
        """What the client has once it has read everything so far."""
        return f"{self.request_id}:{','.join(map(str, self._told))}"

    def is_news(self, event: TextEvent) -> bool:
        """Counts an event; whether the client lacks it. None is news in part (`until_marks`)."""
        told, has = self._told[event.choice], self._has[event.choice]
        now = Mark(told.num_tokens + len(event.token_ids), event.end is not None)
        self._told[event.choice] = now
        return now.num_tokens > has.num_tokens or (now.ended and not has.ended)

    async def until_marks(self, batches: AsyncIterator[TokenBatch]) -> AsyncIterator[TokenBatch]:
        """The same tokens in batches of which each one is news or is not."""
        left = [mark.num_tokens for mark in self._has]
        async for batch in batches:
            old = min(left[batch.choice], len(batch.token_ids))
            left[batch.choice] -= old
            rest = len(batch.token_ids) - old
            # What the client has of the tokens, but not of the end, comes before the end.
            if old and (rest or (batch.stop_reason and not self._has[batch.choice].ended)):
                yield replace(batch, token_ids=batch.token_ids[:old], stop_reason=None)
                batch = replace(batch, token_ids=batch.token_ids[old:])
            yield batch
