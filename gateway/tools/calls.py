"""What a parser finds in a model's text: text for the reader, and calls of tools."""

import json
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; `index` counts them from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments' JSON, as the model wrote it."""

    index: int
    text: str


ToolEvent = TextPiece | CallBegun | ArgumentsPiece


class Calls:
    """Collects what one answer holds. Neighbouring pieces become one.

    Blanks before a call, and all that stand between calls or after them, are layout: they are held
    until other text shows that they were text. Where no call comes they come out in the end.
    After `limit` complete calls nothing more is taken.
    """

    def __init__(self, names: Collection[str], *, limit: int | None = None) -> None:
        self.names = frozenset(names)
        self.longest_name = max(map(len, self.names), default=0)
        self._limit = limit
        self._events: list[ToolEvent] = []
        self._held = ""
        self._is_layout = True
        self._arguments: list[str] = []
        self.num_begun = 0
        self.num_ended = 0
        self._unsound = False

    @property
    def sound(self) -> bool:
        """Whether there are calls, all complete, and all with a JSON object as arguments."""
        return not self._unsound and self.num_begun == self.num_ended > 0

    @property
    def full(self) -> bool:
        """Whether as many calls are complete as may be."""
        return self._limit is not None and self.num_ended >= self._limit

    def text(self, text: str) -> None:
        """Text outside of calls."""
        if self.full:
            return
        if self._is_layout:
            self._held += text
            if not self._held.strip():
                return
            text, self._held, self._is_layout = self._held, "", False
        if text:
            self._add(TextPiece(text))

    def begin(self, name: str) -> None:
        """A call whose name is known and whose arguments follow."""
        if self.full:
            return
        self._held, self._is_layout = "", True
        self._arguments = []
        self._events.append(CallBegun(self.num_begun, name))
        self.num_begun += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if self.full:
            return
        self._arguments.append(text)
        self._add(ArgumentsPiece(self.num_begun - 1, text))

    def end(self) -> None:
        """The call's arguments are complete."""
        if self.full:
            return
        self.num_ended += 1
        if not is_object("".join(self._arguments)):
            self._unsound = True

    def broken(self) -> None:
        """The call that began last is not what calls look like."""
        self._unsound = self._unsound or not self.full

    def finish(self) -> None:
        """No more text comes: held blanks are text where there was no call."""
        if not self.num_begun and self._held:
            self._add(TextPiece(self._held))
        self._held = ""

    def take(self) -> list[ToolEvent]:
        """What was found since the last time."""
        events, self._events = self._events, []
        return events

    def _add(self, event: TextPiece | ArgumentsPiece) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            self._events[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            self._events[-1] = ArgumentsPiece(event.index, last.text + event.text)
        else:
            self._events.append(event)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
