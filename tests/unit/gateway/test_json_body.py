"""Bodies: every bound holds before the parser recurses, and errors name the field alone."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from gateway.json_body import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    brackets_of,
    nesting_exceeds,
    parse_object,
    safe_name,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}"\\ab', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=20,
)


def depth(value):
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def refused(raw):
    with pytest.raises(InvalidRequest) as caught:
        parse_object(raw)
    return caught.value


@settings(deadline=None)
@given(JSON, st.integers(0, 6))
def test_nesting_is_measured_exactly(value, limit):
    assert nesting_exceeds(brackets_of(json.dumps(value).encode()), limit) == (depth(value) > limit)


@settings(deadline=None)
@given(JSON)
def test_what_is_json_is_read_as_the_library_reads_it(value):
    raw = json.dumps({"x": value}, ensure_ascii=False).encode()
    assert parse_object(raw) == {"x": value}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"x":' + b"[" * 10_000 + b"0" + b"]" * 10_000 + b"}",
        b'{"x":' + b'{"a":' * 10_000 + b"0" + b"}" * 10_000 + b"}",
        b"[" * (MAX_DEPTH + 1),
        b'{"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    ],
)
def test_deep_nesting_is_refused_before_it_recurses(raw):
    started = time.perf_counter()
    assert "nested deeper" in refused(raw).message
    assert time.perf_counter() - started < 1.0


def test_a_body_of_a_million_objects_is_refused_before_they_are_made():
    assert "objects and lists" in refused(b"[" * 1_000_000).message
    assert "objects and lists" in refused(b'{"x":[' + b"{}," * MAX_CONTAINERS + b"0]}").message
    fits = b'{"x":[' + b"{}," * (MAX_CONTAINERS - 2) + b"0]}"
    assert len(parse_object(fits)["x"]) == MAX_CONTAINERS - 1


def test_the_deepest_nesting_that_is_allowed_is_read():
    inner = MAX_DEPTH - 1
    assert parse_object(b'{"x":' + b"[" * inner + b"]" * inner + b"}")


@pytest.mark.parametrize(
    "raw", [b'"' + b'\\"' * 500_000, b'{"a":"' + b"\\" * 999_999, b'["]",' * 10_000]
)
def test_scanning_hostile_bytes_is_linear(raw):
    started = time.perf_counter()
    refused(raw)
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    "raw, field",
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": Infinity}', "temperature"),
        (b'{"top_p": -Infinity}', "top_p"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"messages": [{"role": "user"}, {"content": -1e400}]}', "messages[1].content"),
        (b'{"unknown": {"deep": [NaN]}}', "unknown.deep[0]"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
    ],
)
def test_numbers_that_are_not_finite_name_their_field(raw, field):
    error = refused(raw)
    assert error.field == field
    assert "finite" in error.message


@pytest.mark.parametrize(
    "raw, field",
    [
        (rb'{"messages": [{"role": "user", "content": "a\ud800b"}]}', "messages[0].content"),
        (rb'{"messages": [{"tool_call_id": "\udc00"}]}', "messages[0].tool_call_id"),
        (rb'{"stop": ["ok", "\uDBFF"]}', "stop[1]"),
    ],
)
def test_lone_surrogates_name_their_field(raw, field):
    assert refused(raw).field == field


def test_a_surrogate_as_a_key_is_refused():
    assert refused(rb'{"a\ud800": 1}').field == "a?"


def test_surrogate_pairs_nul_and_a_byte_order_mark_are_text():
    assert parse_object(b'\xef\xbb\xbf{"x": "\\ud83d\\ude80\\u0000"}') == {"x": "🚀\x00"}


@pytest.mark.parametrize(
    "raw, words",
    [
        (b'{"x": "\xff\xfe"}', "not UTF-8"),
        ('{"x": 1}'.encode("utf-16"), "not UTF-8"),
        ('{"x": 1}'.encode("utf-16-le"), "not JSON"),
        (b"", "not JSON"),
        (b'{"x": ', "not JSON"),
        (b'{"x": 1} {}', "not JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
    ],
)
def test_what_is_no_json_object_in_utf8_is_refused(raw, words):
    assert words in refused(raw).message


def test_duplicate_keys_are_refused_by_name():
    assert refused(b'{"temperature": 0, "temperature": 2}').field == "temperature"
    assert refused(b'{"messages": [{"role": "a", "role": "b"}]}').field == "role"


def test_names_are_short_and_tame():
    assert safe_name("max_token") == "max_token"
    assert safe_name("a\r\nSet-Cookie: é") == "a??Set-Cookie???"
    assert safe_name("x" * 1000) == "x" * 64 + "..."
