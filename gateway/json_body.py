"""A request body to Python values, with every bound that a JSON parser does not have itself."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from core.errors import InvalidRequest

MAX_DEPTH = 64
# Objects and lists in one body. The parser makes them in one go, at a microsecond each.
MAX_CONTAINERS = 20_000
# A number with more digits than this is no integer that any field takes.
_MAX_INT_DIGITS = 40
_MAX_NAME_CHARS = 64

# A string, or what is left of one that never ends: it always matches at a quote, so the scan is
# linear whatever the input.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_text(text: str, field: str) -> dict[str, Any]:
    """The JSON object in a field's text, within the bounds of a body: see `parse_object`.

    Raises InvalidRequest naming the field.
    """
    try:
        return parse_object(text.encode(), what="the text")
    except UnicodeEncodeError:
        raise InvalidRequest("holds a lone surrogate, which is no text", field=field) from None
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=field) from None


def parse_object(raw: bytes, *, what: str = "the body") -> dict[str, Any]:
    """The JSON object in a body; a leading byte-order mark is tolerated.

    Raises InvalidRequest for what is not UTF-8, not JSON or not an object, for more than
    MAX_CONTAINERS and nesting beyond MAX_DEPTH (both before the parser sees it), for duplicate
    keys, numbers that are not finite, and lone surrogates. No message quotes the
    body but for the names of keys. Linear; a large body belongs in a worker thread.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what} is not UTF-8 (at byte {error.start})") from None
    brackets = brackets_of(raw)
    if brackets.count(b"[") > MAX_CONTAINERS:
        raise InvalidRequest(f"{what} holds more than {MAX_CONTAINERS} objects and lists")
    if nesting_exceeds(brackets, MAX_DEPTH):
        raise InvalidRequest(f"{what} is nested deeper than {MAX_DEPTH} levels")
    suspicions = _Suspicions()
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=suspicions.constant,
            parse_float=suspicions.number,
            parse_int=suspicions.integer,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{what} is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object")
    if suspicions.not_finite or _SURROGATE_ESCAPE.search(raw):
        _refuse_unfit(value)
    return value


def brackets_of(raw: bytes) -> bytes:
    """The brackets of a JSON text, those in strings left out and braces written as brackets."""
    return _STRING.sub(b"", raw).translate(_BRACKETS, _NO_BRACKETS)


def nesting_exceeds(brackets: bytes, limit: int) -> bool:
    """Whether brackets nest deeper than `limit`. Each pass takes the innermost pairs away."""
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    # A pair that is left is too deep. Without one the body is not JSON, and a run of brackets that
    # nothing closes is as deep as it is long.
    return b"[]" in brackets or brackets.count(b"[") > limit


def safe_name(name: str) -> str:
    """A client's key as it may stand in a message or a header: short, printable, nothing else."""
    clipped = name[:_MAX_NAME_CHARS]
    return re.sub(r"[^A-Za-z0-9_.\-]", "?", clipped) + ("..." if len(name) > len(clipped) else "")


def join_path(path: str, part: str | int) -> str:
    """`messages` and 0 to `messages[0]`, that and `content` to `messages[0].content`."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{safe_name(part)}" if path else safe_name(part)


class _Suspicions:
    """Notes while parsing whether a number is not finite, so that only then it is looked for."""

    def __init__(self) -> None:
        self.not_finite = False

    def constant(self, literal: str) -> float:
        self.not_finite = True
        return float(literal.replace("Infinity", "inf"))

    def number(self, literal: str) -> float:
        value = float(literal)
        self.not_finite |= not math.isfinite(value)
        return value

    def integer(self, literal: str) -> int | float:
        if len(literal) <= _MAX_INT_DIGITS:
            return int(literal)
        self.not_finite = True
        return math.inf


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                field = safe_name(name)
                raise InvalidRequest("the key stands twice in one object", field=field)
            seen.add(name)
    return result


def _refuse_unfit(value: dict[str, Any]) -> None:
    for path, leaf in _leaves(value, ""):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise InvalidRequest("must be a finite number", field=path)
        if isinstance(leaf, str) and _SURROGATE.search(leaf):
            raise InvalidRequest("holds a lone surrogate, which is no text", field=path)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every key and every value that is no container, with its path. Depth is bounded before."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield join_path(path, key), key
            yield from _leaves(item, join_path(path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, join_path(path, i))
    else:
        yield path, value
