"""One call written as a JSON object: `{"name": "get_weather", "arguments": {"city": "Paris"}}`.

The keys come in any order, and "parameters" is another word for "arguments". Arguments that are an
object go out as they are written, once the name is known; before that nothing is decided, and the
caller can take all of it back as text.
"""

import json
from collections.abc import Callable, Generator

from gateway.tools.calls import Calls, is_object
from gateway.tools.tape import Reading, Tape

_ARGUMENTS = ("arguments", "parameters")
# What else models write into a call, which says nothing.
_NEUTRAL = ("type", "id")
_NO_ARGUMENTS = "{}"
_PAIRS = {"}": "{", "]": "["}


def read_call(tape: Tape, calls: Calls) -> Reading:
    """Whether a call stands here; begun is begun, though it may prove broken.

    Where none began, whatever was read since the caller's mark can be taken back. From a call's
    beginning on the mark is gone; what stands behind broken arguments is left on the tape.
    """
    if (yield from tape.skip_blanks()) != "{":
        return False
    name: str | None = None
    held: str | None = None  # arguments that came before the name
    begun = False
    char = yield from tape.skip_blanks()
    while char != "}":
        key = yield from _string(tape, char)
        if key is None or (yield from tape.skip_blanks()) != ":":
            return _give_up(tape, calls, begun)
        first = yield from tape.skip_blanks()
        if key in _ARGUMENTS and held is None and not begun:
            if name is not None and first == "{":
                begun = True
                if not (yield from read_arguments(tape, first, name, calls)):
                    return True
                tape.mark()
            elif (held := (yield from _held_arguments(tape, first))) is None:
                return False
        elif key == "name" and name is None:
            name = yield from _string(tape, first, limit=calls.longest_name)
            if name not in calls.names:
                return False
        elif key not in _NEUTRAL or not (yield from read_value(tape, first, _drop)):
            return _give_up(tape, calls, begun)
        char = yield from tape.skip_blanks()
        if char == ",":
            char = yield from tape.skip_blanks()
            if char == "}":
                return _give_up(tape, calls, begun)
        elif char != "}":
            return _give_up(tape, calls, begun)
    if not begun:
        if name is None:
            return False
        calls.begin(name)
        calls.arguments(held if held is not None else _NO_ARGUMENTS)
        calls.end()
    tape.forget()
    return True


def read_arguments(tape: Tape, first: str, name: str, calls: Calls) -> Reading:
    """Begins a call and puts its arguments out; whether they ended before the text did."""
    tape.forget()
    calls.begin(name)
    if not (yield from read_value(tape, first, calls.arguments)):
        calls.broken()
        return False
    calls.end()
    return True


def read_value(tape: Tape, first: str, put: Callable[[str], None]) -> Reading:
    """Puts out one JSON value that begins with `first`; whether it ended before the text did.

    Brackets and strings are followed; whether the rest of it is JSON is for others to ask.
    """
    if first in "{[" and first:
        return (yield from _container(tape, first, put))
    if first == '"':
        put(first)
        return (yield from _rest_of_string(tape, put))
    char = first
    while char and char not in ",}] \t\r\n":
        put(char)
        char = yield from tape.read()
    tape.unread(char)
    return char != first


def _container(tape: Tape, first: str, put: Callable[[str], None]) -> Reading:
    opened = [first]
    put(first)
    while opened:
        char = yield from tape.read()
        if not char:
            return False
        put(char)
        if char == '"':
            if not (yield from _rest_of_string(tape, put)):
                return False
        elif char in "{[":
            opened.append(char)
        elif char in "}]" and opened.pop() != _PAIRS[char]:
            return False
    return True


def _rest_of_string(tape: Tape, put: Callable[[str], None]) -> Reading:
    escaped = False
    while char := (yield from tape.read()):
        put(char)
        if char == '"' and not escaped:
            return True
        escaped = char == "\\" and not escaped
    return False


def _string(tape: Tape, first: str, *, limit: int = 16) -> Generator[None, None, str | None]:
    """The JSON string that begins with `first`; None where there is none, or one too long."""
    if first != '"':
        return None
    parts = [first]
    escaped = False
    while (char := (yield from tape.read())) and len(parts) <= 6 * limit + 1:
        parts.append(char)
        if char == '"' and not escaped:
            break
        escaped = char == "\\" and not escaped
    try:
        value = json.loads("".join(parts))
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _held_arguments(tape: Tape, first: str) -> Generator[None, None, str | None]:
    """Arguments that cannot go out yet, as the text of an object; None where they are none."""
    parts: list[str] = []
    if not (yield from read_value(tape, first, parts.append)):
        return None
    return _as_object("".join(parts))


def _drop(text: str) -> None:
    """For a value that says nothing."""


def _give_up(tape: Tape, calls: Calls, begun: bool) -> bool:
    if begun:
        tape.rewind()
        calls.broken()
    return begun


def _as_object(value: str) -> str | None:
    """Arguments as an object: some models write it into a string, or null for none."""
    if value == "null":
        return _NO_ARGUMENTS
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if isinstance(decoded, str):
        return decoded if is_object(decoded) else None
    return value if isinstance(decoded, dict) else None
