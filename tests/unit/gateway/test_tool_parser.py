"""Calls of tools are found in every common format, however the text is cut, and nothing is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.calls import ArgumentsPiece, CallBegun, TextPiece
from gateway.tools.dialects import Reader, read_hermes, read_llama3, read_mistral
from gateway.tools.parser import ToolParser

NAMES = ("get_weather", "f")
READERS = {"hermes": read_hermes, "llama3": read_llama3, "mistral": read_mistral}
Calls = list[tuple[str, str]]


def parse(reader: Reader, *pieces: str, max_calls: int | None = None) -> tuple[str, Calls, bool]:
    """Text, (name, arguments) of each call, and whether the calls are sound."""
    parser = ToolParser(reader, NAMES, max_calls=max_calls)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    text, names, arguments = "", [], []
    for event in events:
        match event:
            case TextPiece(piece):
                text += piece
            case CallBegun(index, name):
                assert index == len(names)
                names.append(name)
                arguments.append("")
            case ArgumentsPiece(index, piece):
                assert index == len(names) - 1
                arguments[index] += piece
    return text, list(zip(names, arguments, strict=True)), parser.sound


PARIS = '{"city": "Paris"}'
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize(
    ("reader", "text", "calls"),
    [
        (read_hermes, f"<tool_call>\n{CALL}\n</tool_call>", [("get_weather", PARIS)]),
        (
            read_hermes,
            f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
            [("get_weather", PARIS)] * 2,
        ),
        (read_hermes, f"<tool_call>\n{CALL}", [("get_weather", PARIS)]),
        (read_llama3, CALL.replace("arguments", "parameters"), [("get_weather", PARIS)]),
        (read_llama3, f"\n<|python_tag|>{CALL}", [("get_weather", PARIS)]),
        (read_llama3, f"{CALL}; {CALL}", [("get_weather", PARIS)] * 2),
        (read_llama3, f'{{"type": "function", {CALL[1:]}', [("get_weather", PARIS)]),
        (read_mistral, f"[TOOL_CALLS] [{CALL}]", [("get_weather", PARIS)]),
        (read_mistral, f"[TOOL_CALLS][{CALL}, {CALL}]", [("get_weather", PARIS)] * 2),
        (read_mistral, f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", [("get_weather", PARIS)]),
        (
            read_mistral,
            f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{{}}",
            [("get_weather", PARIS), ("f", "{}")],
        ),
    ],
)
def test_each_format_gives_its_calls(reader: Reader, text: str, calls: Calls) -> None:
    assert parse(reader, text) == ("", calls, True)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"a": [1, "}"]}, "name": "f"}', '{"a": [1, "}"]}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "parameters": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('{"id": 7, "name": "\\u0066", "arguments": {"\\"": "\\\\"}}', '{"\\"": "\\\\"}'),
        ('{"name": "f", "arguments": {"ü": "日本😀"}}', '{"ü": "日本😀"}'),
    ],
)
def test_a_call_object_may_be_written_in_several_ways(call: str, arguments: str) -> None:
    for reader, text in (
        (read_hermes, f"<tool_call>{call}</tool_call>"),
        (read_llama3, call),
        (read_mistral, f"[TOOL_CALLS][{call}]"),
    ):
        assert parse(reader, text) == ("", [("f", arguments)], True)


NO_CALLS = [
    "Nothing to call.",
    " \n blanks around \n ",
    "  \n",
    "<tool_call>",
    "<tool_call",
    "<tool_call>\n not JSON </tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}, "name": "unknown"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "other": 1}</tool_call>',
    '<tool_call>{"name": "f",}</tool_call>',
    '<tool_call>{"name": "f" "arguments": {}}',
    '<tool_call><tool_call>{"name": "',
    '{"name": "Bob", "age": 3}',
    '{"city": "Paris"}',
    '{"name": "f", "parameters": "not an object"}',
    "<|python_tag|>print(1)",
    "[TOOL_CALLS]",
    "[TOOL_CALLS] [1, 2]",
    "[TOOL_CALLS]unknown[ARGS]{}",
    "[TOOL_CALLS]f(1)",
    "[[TOOL_CALLS]f",
]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_text_to_the_character(reader: Reader, text: str) -> None:
    assert parse(reader, text) == (text, [], False)


def test_text_before_and_behind_calls_stays() -> None:
    text = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\nDone."
    assert parse(read_hermes, text)[0] == "Let me see.\n\nDone."
    assert parse(read_mistral, f"Let me see.[TOOL_CALLS][{CALL}]")[0] == "Let me see."


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    text = f"<tool_call>oops<tool_call>\n{CALL}</tool_call>"
    assert parse(read_hermes, text) == ("<tool_call>oops", [("get_weather", PARIS)], True)


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": ]}}', '{"a": ]', "}}"),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "{a: 1}", ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1} oops', '{"a": 1}', " oops"),
        ('<tool_call>{"name": "f", "arguments": {}, "x": 1}', "{}", ', "x": 1}'),
    ],
)
def test_a_call_that_breaks_after_it_began_loses_nothing_and_is_not_sound(
    text: str, arguments: str, rest: str
) -> None:
    assert parse(read_hermes, text) == (rest, [("f", arguments)], False)


def test_arguments_come_in_pieces_before_the_call_is_complete() -> None:
    parser = ToolParser(read_hermes, NAMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"') == [
        CallBegun(0, "f"),
        ArgumentsPiece(0, '{"a"'),
    ]
    assert parser.feed(': "b') == [ArgumentsPiece(0, ': "b')]
    assert not parser.sound


def test_text_is_held_back_only_while_it_can_begin_a_call() -> None:
    parser = ToolParser(read_hermes, NAMES)
    assert parser.feed("a < b <tool") == [TextPiece("a < b ")]
    assert parser.feed("box>") == [TextPiece("<toolbox>")]
    assert parser.feed("x") == [TextPiece("x")]


def test_after_the_most_calls_nothing_more_counts() -> None:
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> and so on"
    assert parse(read_hermes, text, max_calls=1) == ("", [("get_weather", PARIS)], True)
    parser = ToolParser(read_hermes, NAMES, max_calls=1)
    parser.feed(f"<tool_call>{CALL[:-1]}")
    assert parser.full


# Fragments that make calls, near calls and text likely.
FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
        CALL, PARIS, '{"name": ', '"f"', '"get_weather"', ', "arguments": ', '"parameters":', "{",
        "}", "[", "]", ",", ";", '"', "\\", " ", "\n", "f", "text", "ü", "😀", "null", "1.5", ":",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200)), limit=st.none() | st.just(1))
def test_any_split_of_a_text_gives_the_same(
    reader: Reader, text: str, cuts: list[int], limit: int | None
) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    whole = parse(reader, text, max_calls=limit)
    assert parse(reader, *pieces, max_calls=limit) == whole
    assert parse(reader, *text, max_calls=limit) == whole


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(text=TEXTS)
def test_text_without_a_call_comes_out_as_it_went_in(reader: Reader, text: str) -> None:
    found, calls, sound = parse(reader, text)
    if not calls:
        assert (found, sound) == (text, False)
    if sound:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(text=st.text(alphabet='<>[]{}",:toolcallTOOLCALLSARGSpython_tag|/ \n\\', max_size=60))
def test_arbitrary_text_is_never_an_error(reader: Reader, text: str) -> None:
    found, calls, _ = parse(reader, text)
    assert found == text or calls
