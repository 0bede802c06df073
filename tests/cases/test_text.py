"""RB-O01, RB-O02: the text of an answer, whatever its tokens and batches look like."""

import json
import time

import pytest

from core.messages import StopReason

SIZES = (1, 2, 3, 5, 100)
SPLIT = ["🦙", "삼겹살", "e\u0301", "👩‍👩‍👧‍👦", "a\u00a0b", "x\ufffdy"]


def text_of(chunks):
    return "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
    )


async def both(http, route="chat", **fields):
    """The text whole and streamed, and the two finish reasons; they must agree."""
    send = getattr(http, route)
    (choice,) = (await send(**fields)).json()["choices"]
    chunks = (await send(stream=True, **fields)).chunks
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert (text_of(chunks), reasons[-1]) == (text, choice["finish_reason"])
    return text, choice["finish_reason"]


class TestSplitCharacters:
    """RB-O01. One character over several tokens."""

    @pytest.mark.parametrize("text", SPLIT)
    @pytest.mark.parametrize("size", SIZES)
    async def test_streamed_whole_and_decoded_at_once_are_one(
        self, http, backend, tokenizer, text, size
    ):
        backend.say(f"so: {text}", size=size)
        ids = tokenizer.encode_plain(f"so: {text}")
        assert await both(http) == (f"so: {text}", "stop")
        assert tokenizer.decode(ids) == f"so: {text}"

    async def test_no_chunk_holds_half_a_character(self, http, backend):
        backend.say("🦙삼겹살")
        for chunk in (await http.chat(stream=True)).chunks:
            assert "\ufffd" not in json.dumps(chunk, ensure_ascii=False)

    @pytest.mark.parametrize("kept", [1, 2])
    async def test_an_answer_cut_inside_a_character_ends_in_one_mark(
        self, http, backend, tokenizer, kept
    ):
        ids = list(tokenizer.encode_plain("🦙"))
        assert len(ids) > 2
        backend.say_ids([*tokenizer.encode_plain("ok "), *ids[:kept]], 1, StopReason.LENGTH)
        assert await both(http) == ("ok \ufffd", "length")


class TestStopStrings:
    """RB-O02."""

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(
        "says, stop, expected",
        [
            ("DEFGHIJKLM", ["DEFGHIJ"], ""),  # over many tokens
            ("ABCDEFGHIJK", ["DEFGHIJ"], "ABC"),
            ("L M N O P Q R", ["ZZ", "O P Q", "```"], "L M N "),
            ("0, 1, 2, 123", ["12", "123"], "0, 1, 2, "),  # one begins the other
            ("0, 123", ["23", "123"], "0, "),
            ("삼겹살 좋아", ["살 좋"], "삼겹"),
            ("aaab", ["aab"], "a"),
        ],
    )
    async def test_nothing_of_a_match_is_sent_and_all_before_it(
        self, http, backend, says, stop, expected, size
    ):
        backend.say(says, size=size)
        assert await both(http, stop=stop) == (expected, "stop")

    @pytest.mark.parametrize("size", SIZES)
    async def test_what_only_began_like_a_stop_string_is_released(self, http, backend, size):
        backend.say("DEF and DEFGHI", size=size)
        assert await both(http, stop=["DEFGHIJ"]) == ("DEF and DEFGHI", "stop")
        backend.say("DEF and DEFGHI", size=size, reason=StopReason.LENGTH)
        assert await both(http, stop=["DEFGHIJ"]) == ("DEF and DEFGHI", "length")

    async def test_the_prompts_own_text_does_not_match(self, http, backend):
        backend.say("fine")
        prompt = "User: hi\nAssistant: ho\nUser: hi\nAssistant:"
        assert await both(http, "complete", prompt=prompt, stop=["\nUser:"]) == ("fine", "stop")

    @pytest.mark.parametrize("stop", [None, []])
    async def test_none_and_an_empty_list_stop_nothing(self, http, stop):
        assert await both(http, stop=stop) == ("Paris is the capital.", "stop")

    @pytest.mark.parametrize(
        "stop", ["", ["ok", ""], [str(i) for i in range(5000)], "x" * 1_000_000, [5], 5]
    )
    async def test_what_cannot_be_a_stop_string_is_refused_at_once(self, http, backend, stop):
        started_s = time.perf_counter()
        reply = await http.complete(stop=stop)
        assert time.perf_counter() - started_s < 1.0
        assert reply.status == 400
        assert reply.error["param"].startswith("stop")
        assert backend.jobs == []
