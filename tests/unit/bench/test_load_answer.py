"""Which event carries tokens, how many there are, and what counts as an error."""

import json

import pytest

from bench.load.answer import Answer, complaint


def event(text: str | None = None, **fields: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return json.dumps({"choices": choices, **fields}).encode()


def usage(completion: int, **fields: object) -> dict[str, object]:
    return {"prompt_tokens": 7, "completion_tokens": completion, **fields}


def answer(*events: bytes, done: bool = True) -> Answer:
    """Of events that come at 0 s, 1 s, 2 s, …"""
    made = Answer()
    for at_s, data in enumerate((*events, b"[DONE]") if done else events):
        made.take(data, float(at_s))
    made.close()
    return made


def test_the_usage_at_the_end_counts_and_is_itself_no_token():
    found = answer(event("a"), event("b"), event(usage=usage(2)))
    assert (found.token_times_s, found.completion_tokens) == ([0.0, 1.0], 2)
    assert (found.prompt_tokens, found.failure) == (7, None)


def test_an_event_of_several_tokens_is_one_time_and_the_usage_has_the_number():
    found = answer(event("several words at once"), event(" and more"), event(usage=usage(9)))
    assert (found.token_times_s, found.completion_tokens) == ([0.0, 1.0], 9)


def test_events_without_a_usage_count_one_token_each():
    assert answer(event("a"), event("b")).completion_tokens == 2


def test_token_ids_tell_how_many_came_even_where_their_text_is_held_back():
    chunks = [{"text": "", "token_ids": [5, 6, 7]}, {"text": "abcd", "token_ids": []}]
    found = answer(*(json.dumps({"choices": [chunk]}).encode() for chunk in chunks))
    assert (found.token_times_s, found.completion_tokens) == ([0.0], 3)


def test_a_running_usage_tells_of_tokens_without_text():
    found = answer(event("a", usage=usage(2)), event("", usage=usage(3)), event("", usage=usage(3)))
    assert (found.token_times_s, found.completion_tokens) == ([0.0, 1.0], 3)


def test_a_last_chunk_with_finish_reason_and_usage_is_no_token():
    last = {
        "choices": [{"text": "", "finish_reason": "length"}],
        "usage": usage(8),
    }
    found = answer(event("a"), event("b"), json.dumps(last).encode())
    assert (found.token_times_s, found.completion_tokens) == ([0.0, 1.0], 8)


def test_roles_and_empty_texts_carry_no_token():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    text = {"choices": [{"delta": {"content": "Hi"}}]}
    found = answer(json.dumps(role).encode(), json.dumps(text).encode(), event(""))
    assert found.token_times_s == [1.0]


def test_thoughts_carry_tokens():
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    assert answer(json.dumps(thought).encode()).token_times_s == [0.0]


@pytest.mark.parametrize(
    ("details", "cached"), [({"cached_tokens": 4}, 4), ({}, None), (None, None)]
)
def test_cached_tokens_are_those_that_the_usage_names(details: object, cached: int | None):
    found = answer(event("a"), event(usage=usage(1, prompt_tokens_details=details)))
    assert found.cached_tokens == cached


def test_an_error_event_is_a_failure_whatever_follows():
    data = json.dumps({"error": {"message": "worker\nlost", "type": "x"}}).encode()
    found = answer(event("a"), data)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.detail) == ("error_event", "worker lost")


@pytest.mark.parametrize(
    ("events", "done", "kind"),
    [
        ([event("a")], False, "broken_off"),
        ([event(usage=usage(0))], True, "no_tokens"),
        ([b"{"], True, "not_this_api"),
        ([b"[1]"], True, "not_this_api"),
        ([b'{"choices": [7]}'], True, "not_this_api"),
        ([b'{"choices": [], "usage": {"prompt_tokens": 1}}'], True, "not_this_api"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(events, done, kind):
    found = answer(*events, done=done)
    assert found.failure is not None
    assert found.failure.kind == kind


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "no model"}, "no model"),
        ({"object": "error", "message": "wrong"}, "wrong"),
        ({"error": {"message": ""}}, "otherwise"),
        (None, "otherwise"),
        ([1], "otherwise"),
    ],
)
def test_a_complaint_is_found_in_the_shapes_that_servers_use(body, said):
    assert complaint(body, "otherwise") == said
