"""RB-O10 to RB-O15: what a stream is made of, how it ends, and whose tokens it holds."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from core.errors import Unavailable
from core.messages import StopReason
from gateway.api import InferenceApi
from gateway.backend import TokenBatch
from gateway.http_app import create_app

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


class EventSource:
    """WHATWG's event stream parser, fed byte by byte."""

    def __init__(self):
        self.dispatched, self._line, self._data, self._cr = [], b"", [], False

    def feed(self, raw):
        for byte in raw:
            char = bytes([byte])
            if char == b"\n" and self._cr:
                self._cr = False
                continue
            self._cr = char == b"\r"
            if char in (b"\r", b"\n"):
                self._end_of_line(self._line.decode())
                self._line = b""
            else:
                self._line += char

    def _end_of_line(self, line):
        if not line:
            if self._data:
                self.dispatched.append("\n".join(self._data))
            self._data = []
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            assert name == "data", name
            self._data.append(value.removeprefix(" "))


class TestUsage:
    """RB-O10."""

    async def test_without_the_option_there_is_none(self, http):
        assert all("usage" not in chunk for chunk in (await http.chat(stream=True)).chunks)

    @pytest.mark.parametrize("n", [1, 2])
    async def test_with_it_there_is_one_behind_all_choices(self, http, backend, n):
        whole = (await http.chat(n=n, temperature=1)).json()
        *ordinary, last = (await http.chat(n=n, temperature=1, **USAGE)).chunks
        assert all(chunk["usage"] is None for chunk in ordinary)
        finished = [
            choice["index"]
            for chunk in ordinary
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert sorted(finished) == list(range(n))
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert last["usage"]["prompt_tokens"] == len(backend.jobs[0].prompt_token_ids)
        assert last["usage"]["completion_tokens"] == n * len(backend.script)

    async def test_it_needs_a_stream(self, http):
        reply = await http.chat(stream=False, stream_options={"include_usage": True})
        assert (reply.status, reply.error["param"]) == (400, "stream_options")


class TestFraming:
    """RB-O11."""

    async def test_a_strict_reader_sees_json_and_one_end(self, http, api, backend):
        waits = asyncio.Event()
        backend.say("a\nb\u2028c\x85d")
        backend.script = [waits, *backend.script]
        api.config = api.config.model_copy(update={"sse_keepalive_s": 0.01})
        quick = type(http)(create_app(api, readiness=lambda: (True, "")))
        reply = quick.reply()
        raw = json.dumps({"model": "demo-model", "messages": HI, "stream": True}).encode()
        call = asyncio.create_task(quick.send("POST", CHAT, [raw], reply=reply))
        await asyncio.wait_for(reply.has(3), 10)
        assert all(part.startswith(b":") for part in reply.parts)
        waits.set()
        await asyncio.wait_for(call, 10)
        source = EventSource()
        source.feed(reply.body)
        *events, last = source.dispatched
        assert last == "[DONE]"
        assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no"
        assert b"id:" not in reply.body.replace(b'"id":', b"")


class TestErrors:
    """RB-O12."""

    async def test_what_is_known_before_the_head_is_a_plain_answer(self, http, backend):
        reply = await http.chat("word " * 9000, stream=True)
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/json"
        backend.refusal = Unavailable("no worker takes it")
        reply = await http.chat(stream=True)
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1

    async def test_what_comes_later_is_an_event_and_no_finish(self, http, backend):
        backend.script = [*backend.script[:5], Unavailable("the worker was lost")]
        reply = await http.chat(stream=True, max_tokens=200)
        source = EventSource()
        source.feed(reply.body)
        *chunks, last = map(json.loads, source.dispatched)
        assert {"type", "code", "request_id"} <= set(last["error"])
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert reply.complete


class TestDisconnects:
    """RB-O13: over HTTP; tests/integration/test_stop_matrix.py holds the workers to it."""

    @pytest.mark.parametrize("stream", [True, False])
    async def test_half_a_body_makes_no_job(self, http, backend, stream):
        half = json.dumps({"model": "demo-model", "messages": HI, "stream": stream}).encode()[:20]
        sent = [{"type": "http.request", "body": half, "more_body": True}]
        answered = []

        async def receive():
            return sent.pop() if sent else {"type": "http.disconnect"}

        async def send(message):
            answered.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await http.app(scope, receive, send)
        assert backend.jobs == []
        assert answered[0]["status"] == 499

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("tokens", [0, 1, 4])
    async def test_work_ends_when_the_client_does(self, http, backend, stream, tokens):
        backend.script = [*backend.script[:tokens], asyncio.Event()]
        leaves = asyncio.Event()
        raw = json.dumps({"model": "demo-model", "messages": HI, "stream": stream}).encode()
        call = asyncio.create_task(http.send("POST", CHAT, [raw], disconnect=leaves))
        await asyncio.wait_for(backend.opened.wait(), 10)
        leaves.set()
        await asyncio.wait_for(backend.closed.wait(), 10)
        assert not (await asyncio.wait_for(call, 10)).complete

    async def test_also_between_the_last_token_and_the_end(self, http, backend):
        parts = len((await http.chat(stream=True)).parts)
        backend.closed.clear()
        leaves = asyncio.Event()
        reply = http.reply()
        raw = json.dumps({"model": "demo-model", "messages": HI, "stream": True}).encode()
        send = http.send("POST", CHAT, [raw], disconnect=leaves, reply=reply, takes=parts - 2)
        call = asyncio.create_task(send)
        await asyncio.wait_for(reply.has(parts - 2), 10)
        leaves.set()
        await asyncio.wait_for(call, 10)
        assert backend.closed.is_set()


class Echo:
    """A model that answers with its prompt, so that a swap would show. Implements Backend."""

    def __init__(self):
        self.running = 0

    @asynccontextmanager
    async def open(self, job):
        self.running += 1
        try:
            yield _Echoing(job)
        finally:
            self.running -= 1


class _Echoing:
    def __init__(self, job):
        self._job = job

    async def __aiter__(self):
        for token_id in self._job.prompt_token_ids:
            await asyncio.sleep(0)
            for choice in range(self._job.num_choices):
                yield TokenBatch(token_ids=(token_id,), choice=choice)
        for choice in range(self._job.num_choices):
            yield TokenBatch(token_ids=(), stop_reason=StopReason.LENGTH, choice=choice)

    def stop(self, reason, choice=None):
        """A stop string matched, which nobody gave."""


@pytest.fixture
def echoing(card, tokenizer, config, http):
    """The API over an echo, and the echo."""
    echo = Echo()
    api = InferenceApi.of_one(card, "demo-model", config, echo, tokenizer=tokenizer)
    yield type(http)(create_app(api, readiness=lambda: (True, ""))), echo
    api.close()


class TestLabels:
    """RB-O14: a client's request id is a label, and finds no request."""

    async def test_one_label_for_three_requests(self, http, backend):
        waits = asyncio.Event()
        backend.script = [waits, *backend.script]
        raw = json.dumps({"model": "demo-model", "messages": HI, "stream": True}).encode()
        leaves = [asyncio.Event() for _ in range(3)]
        label = {"x-request-id": "id-1"}
        calls = [
            asyncio.create_task(http.send("POST", CHAT, [raw], headers=label, disconnect=leave))
            for leave in leaves
        ]
        while len(backend.jobs) < 3:  # noqa: ASYNC110 (it ends in a step of the loop)
            await asyncio.sleep(0)
        leaves[1].set()
        assert not (await asyncio.wait_for(calls[1], 10)).complete
        waits.set()
        for call in (calls[0], calls[2]):
            reply = await asyncio.wait_for(call, 10)
            assert reply.chunks and reply.headers["x-request-id"] == "id-1"
        assert len({job.request_id for job in backend.jobs}) == 3


class TestCrossTalk:
    """RB-O15."""

    async def test_every_answer_holds_its_own_secret_alone(self, echoing):
        http, echo = echoing

        async def ask(i):
            fields = {"stream": i % 2 == 0, "n": 1 + i % 3 % 2, "temperature": 1}
            leaves = asyncio.Event()
            raw = {"model": "demo-model", "prompt": f"secret-{i:03}-word", **fields}
            if i % 3 == 0:
                leaves.set()
            raw = json.dumps(raw).encode()
            reply = await http.send("POST", "/v1/completions", [raw], disconnect=leaves)
            if i % 3 == 0:
                return
            found = reply.chunks if fields["stream"] else [reply.json()]
            for index in range(fields["n"]):
                text = "".join(
                    choice["text"]
                    for chunk in found
                    for choice in chunk["choices"]
                    if choice["index"] == index
                )
                assert text == f"secret-{i:03}-word"

        await asyncio.gather(*map(ask, range(96)))
        assert echo.running == 0
