"""One choice of an answer as it is read for calls of tools."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.tools.calls import ToolEvent
from gateway.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class CallReading:
    """A choice's parser, and what makes ids for its calls."""

    parser: ToolParser
    new_id: Callable[[], str]

    @property
    def called(self) -> bool:
        """Whether the answer calls tools, soundly, so that a client can go and do so."""
        return self.parser.sound

    def read(self, text: str, *, last: bool) -> list[ToolEvent]:
        """What became certain with this text, and with the last one what was held back."""
        events = self.parser.feed(text)
        return events + self.parser.finish() if last else events
