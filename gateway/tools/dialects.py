"""The common ways in which models write calls of tools, each as one reader of a tape.

Hermes (Nous Research's, and Qwen's): `<tool_call>` and `</tool_call>` around each call object.
Llama 3 (its JSON form): call objects alone, behind `<|python_tag|>` or at the answer's beginning,
with semicolons between them. Mistral: `[TOOL_CALLS]` and a list of call objects, or in later
releases a name with its arguments behind each `[TOOL_CALLS]`.

A reader runs until the text ends. What only looked like a call is text, to the character.
"""

from collections.abc import Callable, Generator

from gateway.tools.call_object import read_arguments, read_call
from gateway.tools.calls import Calls
from gateway.tools.tape import Reading, Tape

Reader = Callable[[Tape, Calls], Generator[None, None, None]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_OPEN, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read_hermes(tape: Tape, calls: Calls) -> Generator[None, None, None]:
    """Calls between tags, and text around them."""
    while (yield from _text_until(tape, calls, HERMES_OPEN)):
        tape.mark()
        if not (yield from read_call(tape, calls)):
            tape.rewind()
            calls.text(HERMES_OPEN)
        else:
            yield from _takes_after_blanks(tape, HERMES_CLOSE)


def read_llama3(tape: Tape, calls: Calls) -> Generator[None, None, None]:
    """Call objects where the answer begins, behind the tag, or behind another call."""
    marker = ""
    while True:
        tape.mark()
        first = yield from tape.skip_blanks(";" if calls.num_begun else "")
        tape.unread(first)
        if first == "{" and (yield from read_call(tape, calls)):
            marker = ""
            continue
        tape.rewind()
        calls.text(marker)
        if not (yield from _text_until(tape, calls, LLAMA_TAG)):
            return
        marker = LLAMA_TAG


def read_mistral(tape: Tape, calls: Calls) -> Generator[None, None, None]:
    """What follows each `[TOOL_CALLS]`: a list of call objects, or a name and its arguments."""
    while (yield from _text_until(tape, calls, MISTRAL_OPEN)):
        tape.mark()
        first = yield from tape.skip_blanks()
        if first == "[":
            found = yield from _list_of_calls(tape, calls)
        else:
            found = yield from _named_call(tape, first, calls)
        if not found:
            tape.rewind()
            calls.text(MISTRAL_OPEN)


def _list_of_calls(tape: Tape, calls: Calls) -> Reading:
    """Behind the bracket. From its first call on it is a list, however it ends."""
    if not (yield from read_call(tape, calls)):
        return False
    while True:
        char = yield from tape.skip_blanks()
        if char != ",":
            if char != "]":
                tape.unread(char)
            return True
        tape.mark()
        before = calls.num_begun
        yield from read_call(tape, calls)
        if calls.num_begun == before:
            calls.broken()
            tape.rewind()
            return True


def _named_call(tape: Tape, first: str, calls: Calls) -> Reading:
    """`name{…}`, `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`; the id is the model's own."""
    name, char = "", first
    while char and char not in "[{ \t\r\n" and len(name) <= calls.longest_name:
        name += char
        char = yield from tape.read()
    if name not in calls.names:
        return False
    rest = ""
    while char and char != "{" and len(rest) <= len(MISTRAL_CALL_ID + MISTRAL_ARGS) + 64:
        rest += char
        char = yield from tape.read()
    rest = rest.strip()
    told = not rest or rest == MISTRAL_ARGS
    told = told or (rest.startswith(MISTRAL_CALL_ID) and rest.endswith(MISTRAL_ARGS))
    if char != "{" or not told:
        return False
    yield from read_arguments(tape, char, name, calls)
    return True


def _text_until(tape: Tape, calls: Calls, marker: str) -> Reading:
    """Lets text through up to the marker, which is read; False at the end of the text."""
    held = ""
    while held != marker:
        char = yield from tape.read()
        if not char:
            calls.text(held)
            return False
        held += char
        while not marker.startswith(held):
            calls.text(held[0])
            held = held[1:]
    return True


def _takes_after_blanks(tape: Tape, literal: str) -> Reading:
    """Reads blanks and the literal; leaves all of it where the literal does not come."""
    tape.mark()
    char = yield from tape.skip_blanks()
    for i, expected in enumerate(literal):
        if i:
            char = yield from tape.read()
        if char != expected:
            tape.rewind()
            return False
    tape.forget()
    return True
