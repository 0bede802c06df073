"""What operators can see of the last requests: ids, times and ends, and never a word of them."""

import json

import pytest

from gateway.outcome import Outcome, OutcomeKind
from gateway.recent import RecentRequests
from gateway.request_record import RequestRecord


def record(name, **fields):
    made = RequestRecord(
        request_id=f"label-{name}",
        job=f"chatcmpl-{name}",
        operation="chat",
        path="/v1/chat/completions?secret=1",
        model="m",
        ttft_s=0.25,
        outcome=Outcome(OutcomeKind.ANSWERED, "eos"),
        **fields,
    )
    made.waterfall.add("validate", made.started_s, made.started_s + 0.5)
    made.waterfall.add("decode", made.started_s + 0.5, made.started_s + 2, process="decode-0")
    return made


@pytest.fixture
def recent():
    return RecentRequests(3)


def jobs(requests):
    return [told["job"] for told in requests]


def test_a_request_is_found_by_its_ids_or_by_how_one_begins(recent):
    recent.add(record("aaaaaa1"), 200)
    recent.add(record("aaaaaa2"), 200)
    assert jobs(recent.find("label-aaaaaa1")) == ["chatcmpl-aaaaaa1"]
    assert jobs(recent.find("chatcmpl-aaaaaa")) == ["chatcmpl-aaaaaa2", "chatcmpl-aaaaaa1"]
    assert recent.find("chat") == []  # too short to mean one
    assert recent.find("nobody-knows") == []


def test_what_is_told_has_the_stages_in_seconds_since_the_request_came(recent):
    recent.add(record("x"), 200)
    (told,) = recent.find("chatcmpl-x")
    assert [(each["name"], each["process"]) for each in told["stages"]] == [
        ("validate", "gateway"),
        ("decode", "decode-0"),
    ]
    assert [each["end_s"] for each in told["stages"]] == [0.5, 2.0]
    assert (told["outcome"], told["reason"], told["status"]) == ("answered", "eos", 200)
    assert "secret" not in json.dumps(told)


def test_a_search_wants_every_word_and_gives_the_latest_first(recent):
    recent.add(record("one"), 200)
    recent.add(record("two"), 503)
    assert jobs(recent.search("", 10)) == ["chatcmpl-two", "chatcmpl-one"]
    assert jobs(recent.search("DECODE-0 503", 10)) == ["chatcmpl-two"]
    assert jobs(recent.search("", 1)) == ["chatcmpl-two"]
    assert recent.search("decode-1", 10) == []
    assert "stages" not in recent.search("", 1)[0]
    assert recent.search("", 10, model="m") == recent.search("", 10)
    assert recent.search("", 10, model="other") == []


def test_the_oldest_are_forgotten_past_the_number_and_past_the_bytes():
    few = RecentRequests(3)
    for name in "abcde":
        few.add(record(name), 200)
    assert jobs(few.search("", 10)) == ["chatcmpl-e", "chatcmpl-d", "chatcmpl-c"]
    small = RecentRequests(1000, max_bytes=4000)
    for i in range(50):
        small.add(record(f"{i:03}"), 200)
    assert 0 < len(small) < 10
    assert 0 < small.num_bytes <= 4000
    assert jobs(small.search("", 1)) == ["chatcmpl-049"]


def test_requests_for_no_answer_are_left_out_and_none_are_kept_where_none_are_wanted():
    recent = RecentRequests(10)
    recent.add(RequestRecord(path="/v1/models"), 200)
    assert len(recent) == 0
    none = RecentRequests(0)
    none.add(record("x"), 200)
    assert len(none) == 0


def test_times_to_the_first_token_are_those_of_late(recent):
    recent.add(record("x"), 200)
    (entry,) = recent._entries
    assert recent.ttfts_s(entry.ended_s - 1) == [0.25]
    assert recent.ttfts_s(entry.ended_s + 1) == []
