"""Calls of tools out of a model's text, while it comes."""

from collections.abc import Collection

from gateway.tools.calls import Calls, ToolEvent
from gateway.tools.dialects import Reader
from gateway.tools.tape import Tape


class ToolParser:
    """Reads one answer. A pure state machine: any split of the text gives the same pieces, joined.

    `names` are the tools that may be called: a call of another is text. A call begins once its name
    is known and its arguments start; before that a malformed one is text, to the character, and
    after it what was written is in its arguments or behind it. `max_calls` ends the answer after
    so many complete calls.
    """

    def __init__(
        self, reader: Reader, names: Collection[str], *, max_calls: int | None = None
    ) -> None:
        self._tape = Tape()
        self._calls = Calls(names, limit=max_calls)
        self._machine = reader(self._tape, self._calls)

    @property
    def sound(self) -> bool:
        """Whether there are calls, all complete, and all with a JSON object as arguments."""
        return self._calls.sound

    @property
    def full(self) -> bool:
        """Whether `max_calls` are complete: what follows counts for nothing."""
        return self._calls.full

    def feed(self, text: str) -> list[ToolEvent]:
        """What became certain with this text."""
        if text:
            self._tape.add(text)
            next(self._machine)
        return self._calls.take()

    def finish(self) -> list[ToolEvent]:
        """What was held back, now that the text is over."""
        self._tape.end()
        for _ in self._machine:
            raise AssertionError("a reader does not pause at the end of its text")
        self._calls.finish()
        return self._calls.take()
