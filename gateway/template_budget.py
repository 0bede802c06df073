"""What one render of a chat template may use up, and what no single operation may make."""

import re
import time
from collections.abc import Iterable

MAX_ITERATIONS = 1_000_000
# Characters and items that all values of a render have together.
MAX_SIZE = 2**26
# A width, a factor or an exponent beyond this makes no sense in a prompt.
MAX_NUMBER = 100_000
# Within a format: such a width, or one that is an argument (`%*d`, `{:{}}`).
_WIDE = re.compile(r"\d{6,}|\*|:[^{}]*\{")


class TooMuch(Exception):
    """The template computes too long (`late`) or makes something too large."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__("the template computes too much")
        self.late = late


class Budget:
    """Loop turns, sizes and seconds of one render. Everything raises TooMuch past its bound."""

    def __init__(self, *, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._iterations = MAX_ITERATIONS
        self._size = MAX_SIZE

    def tick(self, turns: int = 1) -> None:
        """Pays for turns of a loop."""
        self._iterations -= turns
        if self._iterations < 0:
            raise TooMuch
        if time.monotonic() > self._end_s:
            raise TooMuch(late=True)

    def made(self, value: object) -> None:
        """Pays for a value that is there."""
        if isinstance(value, str | list | tuple | dict):
            self.make(len(value))

    def make(self, size: int) -> None:
        """Pays for a value of this size."""
        self._size -= size
        if self._size < 0:
            raise TooMuch

    def range(self, *args: int) -> range:
        """Jinja's `range`, paid for as it is handed out: a filter may turn it into a list."""
        numbers = range(*args)
        self.tick(len(numbers))
        return numbers

    # What these refuse or pay for would otherwise be one operation, within which nothing ticks.

    def product(self, left: object, right: object) -> None:
        """Before `left * right`."""
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                self.make(max(0, len(sequence) * times))
        refuse_large(*(each for each in (left, right) if _is_huge(each)))

    def replacing(self, text: str, old: object, new: object) -> None:
        """Before `text.replace(old, new)`."""
        if isinstance(old, str) and isinstance(new, str):
            self.make(max(0, text.count(old) * (len(new) - len(old))))

    def joining(self, separator: object, items: object) -> None:
        """Before items are joined."""
        if isinstance(items, list | tuple) and isinstance(separator, str):
            self.make(len(separator) * len(items))
            self.make(sum(len(item) for item in items if isinstance(item, str)))


def refuse_large(*numbers: object) -> None:
    """Raises TooMuch for a number beyond MAX_NUMBER."""
    if any(isinstance(each, int | float) and abs(each) > MAX_NUMBER for each in numbers):
        raise TooMuch


def refuse_wide(pattern: object, values: Iterable[object]) -> None:
    """Raises TooMuch for a format that could be wider than it should."""
    if isinstance(pattern, str) and (found := _WIDE.search(pattern)):
        if found[0][0].isdigit():
            raise TooMuch
        refuse_large(*values)


def _is_huge(value: object) -> bool:
    """A number of so many digits that computing with it takes time."""
    return isinstance(value, int) and value.bit_length() > 1024
