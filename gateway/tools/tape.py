"""A model's text as it arrives, read one character at a time, with the right to go back."""

from collections import deque
from collections.abc import Generator

# What reads from a tape: a generator that pauses wherever the text is not there yet.
Reading = Generator[None, None, bool]
Char = Generator[None, None, str]


class Tape:
    """Text in at one end, characters out at the other.

    A reader pauses (yields) until the next character is there, so that what it does depends on the
    text alone and never on how the text was cut.
    """

    def __init__(self) -> None:
        self._ahead: deque[str] = deque()
        self._ended = False
        # What was read since the oldest mark; None where nobody marked.
        self._behind: list[str] | None = None

    def add(self, text: str) -> None:
        """More text."""
        self._ahead.extend(text)

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def read(self) -> Char:
        """The next character; "" at the end of the text."""
        while not self._ahead:
            if self._ended:
                return ""
            yield
        char = self._ahead.popleft()
        if self._behind is not None:
            self._behind.append(char)
        return char

    def unread(self, char: str) -> None:
        """Puts the character that was read last back; "" is nothing."""
        if char:
            self._ahead.appendleft(char)
            if self._behind is not None:
                self._behind.pop()

    def mark(self) -> None:
        """From here on, what is read can be taken back."""
        self._behind = []

    def forget(self) -> None:
        """What was read since the mark stays read."""
        self._behind = None

    def rewind(self) -> None:
        """Goes back to the mark."""
        self._ahead.extendleft(reversed(self._behind or ()))
        self._behind = None

    def skip_blanks(self, more: str = "") -> Char:
        """The first character that is neither JSON's white space nor one of `more`."""
        while True:
            char = yield from self.read()
            if not char or (char not in " \t\r\n" and char not in more):
                return char
