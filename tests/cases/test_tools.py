"""RB-O20, RB-O21, RB-O22: calls that quote their own end, blanks without end, hostile patterns."""

import asyncio
import json
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from core.config import ClusterConfig, GatewayConfig
from core.grammar import grammar_source
from core.messages import Grammar, GrammarKind, StopReason

TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
TEXT = 'a </tool_call> b {"k": 1} \u4f60'
CALL = json.dumps({"name": "write_file", "arguments": {"text": TEXT}})
SIZES = (1, 2, 3, 5, 8, 9999)


@pytest.fixture
def config():
    return ClusterConfig(gateway=GatewayConfig(tool_parser="hermes"))


class TestCalls:
    """RB-O20."""

    async def both(self, http):
        """The message whole, which a stream put together must be, and the finish reason."""
        (choice,) = (await http.chat(tools=[TOOL])).json()["choices"]
        content, calls, reason = await self.streamed(http)
        assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
        assert content == (choice["message"]["content"] or "")
        assert reason == choice["finish_reason"]
        return content, calls, reason

    async def streamed(self, http):
        """Content, calls and finish reason, put together from a stream."""
        chunks = (await http.chat(tools=[TOOL], stream=True)).chunks
        content, calls = "", {}
        for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
            content += delta.get("content") or ""
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for name, piece in part["function"].items():
                    call[name] += piece
        return content, list(calls.values()), chunks[-1]["choices"][0]["finish_reason"]

    @pytest.mark.parametrize("size", SIZES)
    async def test_an_end_that_is_quoted_does_not_end_the_call(self, http, backend, size):
        backend.say(f"<tool_call>\n{CALL}\n</tool_call>", size=size)
        content, (call,), reason = await self.both(http)
        assert (content.strip(), call["name"], reason) == ("", "write_file", "tool_calls")
        assert json.loads(call["arguments"]) == {"text": TEXT}

    @pytest.mark.parametrize("size", SIZES)
    async def test_a_call_that_is_cut_has_no_brace_invented(self, http, backend, size):
        backend.say(f"<tool_call>\n{CALL[:60]}", size=size, reason=StopReason.LENGTH)
        _, (call,), reason = await self.streamed(http)
        assert reason == "length"
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["arguments"])
        # In one piece it is no call at all, and all of it is there as text.
        (choice,) = (await http.chat(tools=[TOOL])).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert CALL[:60] in choice["message"]["content"]

    @pytest.mark.parametrize("size", SIZES)
    async def test_what_is_no_call_is_told_as_text(self, http, backend, size):
        said = '<tool_call>\n{"name": 5}\n</tool_call>'
        backend.say(said, size=size)
        assert await self.both(http) == (said, [], "stop")


class TestWhitespace:
    """RB-O21."""

    SCHEMA = {  # noqa: RUF012
        "type": "object",
        "properties": {
            "label": {"enum": ["중성", "중성적", 'a"b', "é"]},
            "note": {"type": "string"},
        },
        "required": ["label", "note"],
        "additionalProperties": False,
    }

    @pytest.fixture
    def takes(self, card):
        """Whether an answer may begin like this, and whether it may end there."""
        tokenizer = LLTokenizer(card.tokenizer_path.read_text())
        text = json.dumps(self.SCHEMA)
        source = grammar_source(Grammar(kind=GrammarKind.JSON_SCHEMA, text=text))

        def check(answer):
            matcher = LLMatcher(tokenizer, source)
            ids = tokenizer.tokenize_bytes(answer.encode())
            return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()

        return check

    def test_blanks_between_tokens_are_bounded(self, takes):
        assert takes('{ "label": "é",\n "note": "x" }') == (True, True)
        assert takes("{" + " " * 9) == (False, False)
        assert takes("{\n" + " " * 40) == (False, False)

    @pytest.mark.parametrize("label", ["중성", "중성적", 'a"b', "é"])
    def test_values_are_matched_exactly(self, takes, label):
        whole = json.dumps({"label": label, "note": "x"}, ensure_ascii=False)
        assert takes(whole) == (True, True)
        assert takes(whole[:-1] + ', "more": 1}')[0] is False
        assert takes('{"label": "중성X')[0] is False

    async def test_an_answer_that_is_cut_says_so(self, http, backend):
        backend.say('{"label": "é', reason=StopReason.LENGTH)
        schema = {"name": "c", "strict": True, "schema": self.SCHEMA}
        asked = {"type": "json_schema", "json_schema": schema}
        (choice,) = (await http.chat(response_format=asked)).json()["choices"]
        assert choice["finish_reason"] == "length"


class TestPatterns:
    """RB-O22. Checked before the queue, by the library that will hold the answer to them."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"guided_regex": "("},
            {"guided_regex": "(x{1,1000}){1,1000}"},
            {"guided_regex": "(a+)+$"},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "string", "pattern": "([abc]*)*"},
                    },
                }
            },
        ],
    )
    async def test_none_holds_the_loop_or_the_server_up(self, http, backend, fields):
        slowest_s = 0.0

        async def watch():
            nonlocal slowest_s
            while True:
                before_s = time.perf_counter()
                await asyncio.sleep(0.001)
                slowest_s = max(slowest_s, time.perf_counter() - before_s)

        watching = asyncio.create_task(watch())
        started_s = time.perf_counter()
        reply = await http.chat(**fields)
        took_s = time.perf_counter() - started_s
        watching.cancel()
        assert reply.status in (200, 400)
        assert took_s < 10 and slowest_s < 1.0
        if fields.get("guided_regex") == "(":
            assert (reply.status, reply.error["param"]) == (400, "guided_regex")
        assert (await http.chat()).status == 200
