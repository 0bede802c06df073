"""The HTTP API as clients see it: shapes, streams, headers, and what happens when they leave."""

import asyncio
import json

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    Overloaded,
    Unavailable,
)
from core.messages import StopReason
from gateway import sse
from gateway.backend import TokenBatch
from gateway.http_app import create_app

HI = [{"role": "user", "content": "hi"}]


def text_of(chunks):
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
    )


async def test_a_chat_is_answered_whole(http, backend, card):
    reply = await http.chat()
    assert reply.status == 200
    body = reply.json()
    prompt = len(backend.jobs[0].prompt_token_ids)
    completion = len(backend.script)
    assert body == {
        "id": backend.jobs[0].request_id,
        "object": "chat.completion",
        "created": body["created"],
        "model": "demo-model",
        "system_fingerprint": f"fp_{card.revision[:16]}",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Paris is the capital.",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert body["id"].startswith("chatcmpl-")


async def test_a_completion_is_answered_whole(http, backend, tokenizer):
    body = (await http.complete("Hello <|im_end|>", max_tokens=9)).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Paris is the capital.", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["id"].startswith("cmpl-")
    assert backend.jobs[0].prompt_token_ids == tokenizer.encode_prompt("Hello <|im_end|>")
    assert not tokenizer.controls.ids & set(backend.jobs[0].prompt_token_ids)


async def test_a_chat_is_streamed(http, backend):
    reply = await http.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.complete
    first, *middle, last = reply.chunks
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert text_of(middle) == "Paris is the capital."
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert {chunk["id"] for chunk in reply.chunks} == {backend.jobs[0].request_id}
    assert all("usage" not in chunk for chunk in reply.chunks)


async def test_a_completion_is_streamed(http):
    *chunks, last = (await http.complete(stream=True)).chunks
    assert text_of(chunks) == "Paris is the capital."
    assert last["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in [*chunks, last]} == {"text_completion"}


@pytest.mark.parametrize("name", ["chat", "complete"])
async def test_usage_is_streamed_once_where_it_is_asked_for(http, name):
    send = getattr(http, name)
    whole = (await send()).json()
    chunks = (await send(stream=True, stream_options={"include_usage": True})).chunks
    *ordinary, usage = chunks
    assert all(chunk["usage"] is None for chunk in ordinary)
    assert ordinary[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]


@pytest.mark.parametrize("name", ["chat", "complete"])
async def test_timing_comes_beside_usage_where_it_is_asked_for(http, name):
    send = getattr(http, name)
    assert "timing" not in (await send()).json()
    whole = (await send(include_timing=True)).json()
    streamed = (await send(stream=True, include_timing=True)).chunks[-1]
    for told in (whole, streamed):
        assert told["timing"]["queue_s"] == 0.5 and told["timing"]["ttft_s"] > 0
        assert told["usage"] == whole["usage"]
    assert streamed["choices"] == []


@pytest.mark.parametrize(
    "text", ["a\nb\r\nc\u2028d\u2029e\x85f", "삼겹살 🚀 e\u0301 👨‍👩‍👧", '"\\ {}']
)
@pytest.mark.parametrize("size", [1, 3, 50])
async def test_streamed_and_whole_text_agree_to_the_byte(http, backend, text, size):
    backend.say(text, size=size)
    whole = (await http.chat()).json()["choices"][0]["message"]["content"]
    reply = await http.chat(stream=True)
    assert whole == text == text_of(reply.chunks)
    # Line readers that know more line ends than the specification see the same events.
    assert [line for line in reply.body.decode().splitlines() if line] == [
        f"data: {data}" for data in reply.data
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_and_a_limit_have_their_finish_reasons(http, backend, stream):
    async def finish(**fields):
        reply = await http.chat(stream=stream, **fields)
        body = reply.chunks if stream else [reply.json()]
        text = text_of(body) if stream else body[0]["choices"][0]["message"]["content"]
        return text, body[-1]["choices"][0]["finish_reason"]

    assert await finish(stop="capital") == ("Paris is the ", "stop")
    assert await finish(stop=[]) == ("Paris is the capital.", "stop")
    backend.say("and so", reason=StopReason.LENGTH)
    assert await finish(stop=None) == ("and so", "length")


async def test_values_reach_the_engine_resolved(http, backend, card):
    await http.complete("x")
    defaults = backend.jobs[0].sampling
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, 0)
    assert defaults.repetition_penalty == 1.0
    assert defaults.max_new_tokens == card.context_window - 1
    assert 0 <= defaults.seed < 2**63
    await http.complete("x")
    assert backend.jobs[1].sampling.seed != defaults.seed
    await http.complete(
        "x",
        temperature=0,
        top_p=1e-9,
        top_k=9_999_999,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=10,
        seed=-(2**63),
        max_tokens=8191,
        stop_token_ids=[5, 7, 5],
        ignore_eos=True,
    )
    asked = backend.jobs[2].sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0, 1e-9, 49152, 1)
    assert (asked.presence_penalty, asked.frequency_penalty) == (-2, 2)
    assert (asked.repetition_penalty, asked.seed) == (10, -(2**63))
    assert (asked.max_new_tokens, asked.stop_token_ids, asked.ignore_eos) == (8191, (5, 7), True)
    await http.complete("x", top_k=-1, seed=0, max_tokens=None, temperature=None)
    assert backend.jobs[3].sampling.top_k == 0
    assert backend.jobs[3].sampling.seed == 0


async def test_content_parts_are_their_texts_joined(http, backend):
    await http.chat([{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}])
    await http.chat("part onepart two")
    assert backend.jobs[0].prompt_token_ids == backend.jobs[1].prompt_token_ids


async def test_prompts_as_lists(http, backend, tokenizer):
    await http.complete(["hello"])
    await http.complete([1, 2, 49151])
    assert backend.jobs[0].prompt_token_ids == tokenizer.encode_prompt("hello")
    assert backend.jobs[1].prompt_token_ids == (1, 2, 49151)


async def test_values_that_ask_for_nothing_pass(http):
    reply = await http.chat(
        n=1,
        logprobs=False,
        top_logprobs=None,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        logit_bias={},
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        modalities=["text"],
        stop=None,
        stream=None,
        stream_options=None,
    )
    assert reply.status == 200
    assert "x-tandem-ignored-fields" not in reply.headers
    reply = await http.complete(echo=False, best_of=1, suffix=None, n=None, logprobs=None)
    assert reply.status == 200


async def test_unknown_fields_are_dropped_and_named(http):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": 1}]}]
    reply = await http.chat(messages=messages, max_token=5, kv_transfer_params={"a": 1})
    assert reply.status == 200
    assert reply.headers["x-tandem-ignored-fields"] == (
        "max_token, kv_transfer_params, messages[0].content[0].cache_control"
    )
    many = {f"x{i}\r\nSet-Cookie": i for i in range(1000)}
    reply = await http.complete(stream=True, **many)
    assert reply.status == 200
    named = reply.headers["x-tandem-ignored-fields"]
    assert named.endswith("+984")
    assert len(named) < 2000 and "\r" not in named and "\n" not in named


async def test_the_clients_request_id_is_a_label_only(http, backend):
    body = {"model": "demo-model", "prompt": "x"}
    for _ in range(2):
        reply = await http.post("/v1/completions", body, headers={"x-request-id": "id 1"})
        assert reply.headers["x-request-id"] == "id 1"
    first, second = (job.request_id for job in backend.jobs)
    assert first != second
    assert "id 1" not in first + second
    refused = await http.post("/v1/completions", b"{", headers={"x-request-id": "id-2"})
    assert refused.headers["x-request-id"] == "id-2"
    assert (await http.complete()).headers["x-request-id"].startswith("req-")


async def test_models_are_listed_and_described(http):
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("demo-model", "model", "tandem")
    assert model["context_window"] == 8192
    assert (await http.get("/v1/models/demo-model")).json() == model


async def test_health_and_readiness(http, api):
    assert (await http.get("/healthz")).status == 200
    assert (await http.get("/readyz")).status == 200
    reason = "no decode worker is registered"
    waiting = type(http)(create_app(api, readiness=lambda: (False, reason)))
    reply = await waiting.get("/readyz")
    assert reply.status == 503
    assert reply.json()["reason"] == reason
    assert (await waiting.get("/healthz")).status == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/version", "/v1/models"])
async def test_what_is_read_can_be_probed_by_head(http, path):
    """Some load balancers ask so, and see the status that GET has."""
    asked, probed = await http.get(path), await http.send("HEAD", path, [b""])
    assert (probed.status, probed.headers["content-length"]) == (
        asked.status,
        asked.headers["content-length"],
    )


async def test_the_api_describes_itself(http):
    document = (await http.get("/openapi.json")).json()
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatBody"]["required"]) == {"model", "messages"}
    references = [
        part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]
    ]
    assert references and set(references) <= set(schemas)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "refusal, status, code, kind",
    [
        (Overloaded("full", retry_after_s=2.2), 503, "overloaded", "overloaded_error"),
        (Unavailable("no worker"), 503, "unavailable", "service_unavailable"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", "timeout_error"),
        (Internal("broken"), 500, "internal", "server_error"),
        (KeyError("CANARY"), 500, "internal", "server_error"),
    ],
)
async def test_a_refused_job_is_a_plain_error(http, backend, stream, refusal, status, code, kind):
    backend.refusal = refusal
    reply = await http.chat(stream=stream)
    assert reply.status == status
    assert (reply.error["code"], reply.error["type"]) == (code, kind)
    assert "CANARY" not in reply.body.decode()
    if status == 503:
        assert int(reply.headers["retry-after"]) == (3 if code == "overloaded" else 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_is_a_plain_error(http, backend, stream):
    backend.script = [Unavailable("the worker was lost")]
    reply = await http.chat(stream=stream)
    assert reply.status == 503
    assert reply.error["code"] == "unavailable"
    assert "retry-after" in reply.headers
    assert backend.closed.is_set()


@pytest.mark.parametrize(
    "error, code",
    [
        (Unavailable("the worker was lost"), "unavailable"),
        (Cancelled("the server stops"), "cancelled"),
        (KeyError("CANARY"), "internal"),
    ],
)
async def test_an_error_after_the_first_token_is_an_event_and_no_end(
    http, backend, capsys, error, code
):
    backend.script = [*backend.script[:3], error]
    reply = await http.chat(stream=True)
    assert reply.status == 200
    assert reply.complete
    *chunks, last = map(json.loads, reply.data)
    assert last["error"]["code"] == code
    assert last["error"]["request_id"] == reply.headers["x-request-id"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert b"[DONE]" not in reply.body
    assert backend.closed.is_set()
    captured = capsys.readouterr()
    assert "CANARY" not in reply.body.decode() + captured.out + captured.err
    # In one piece there is no half answer.
    whole = await http.chat()
    assert whole.error["code"] == code


@pytest.mark.parametrize("stream", [True, False])
async def test_a_timeout_is_told_as_one(http, backend, stream):
    backend.script = [TokenBatch(token_ids=(), stop_reason=StopReason.TIMEOUT)]
    reply = await http.chat(stream=stream)
    assert reply.status == 504
    assert reply.error["type"] == "timeout_error"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_first", [0, 3])
async def test_a_client_that_leaves_ends_the_job(http, backend, stream, tokens_first):
    backend.script = [*backend.script[:tokens_first], asyncio.Event()]
    leaves = asyncio.Event()
    call = asyncio.create_task(
        http.send(
            "POST",
            "/v1/chat/completions",
            [json.dumps({"model": "demo-model", "messages": HI, "stream": stream}).encode()],
            disconnect=leaves,
        )
    )
    await asyncio.wait_for(backend.opened.wait(), 10)
    assert not backend.closed.is_set()
    leaves.set()
    await asyncio.wait_for(backend.closed.wait(), 10)
    reply = await asyncio.wait_for(call, 10)
    assert not reply.complete


async def test_a_server_that_stops_ends_the_job(http, backend):
    backend.script = [asyncio.Event()]
    call = asyncio.create_task(http.chat(stream=True))
    await asyncio.wait_for(backend.opened.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert backend.closed.is_set()


async def silent_stream(http, api, *, parts):
    """A stream whose keepalives come fast, as soon as it has written this many parts."""
    api.config = api.config.model_copy(update={"sse_keepalive_s": 0.01})
    fast = type(http)(create_app(api, readiness=lambda: (True, "")))
    reply = http.reply()
    body = json.dumps({"model": "demo-model", "messages": HI, "stream": True}).encode()
    call = asyncio.create_task(fast.send("POST", "/v1/chat/completions", [body], reply=reply))
    await asyncio.wait_for(reply.has(parts), 10)
    return reply, call


async def test_silence_is_broken_by_comments_that_are_no_events(api, backend, http):
    waits = asyncio.Event()
    backend.script = [waits, *backend.script]
    reply, call = await silent_stream(http, api, parts=3)
    assert set(reply.parts) == {b": keepalive\n\n"}
    assert reply.status == 200
    waits.set()
    await asyncio.wait_for(call, 10)
    assert text_of(reply.chunks) == "Paris is the capital."


async def test_an_error_after_a_keepalive_is_an_event(api, backend, http):
    waits = asyncio.Event()
    backend.script = [waits, Unavailable("the worker was lost")]
    reply, call = await silent_stream(http, api, parts=1)
    waits.set()
    await asyncio.wait_for(call, 10)
    assert json.loads(reply.data[-1])["error"]["code"] == "unavailable"
    assert reply.complete


async def test_a_client_that_reads_nothing_ends_the_job(http, backend, monkeypatch):
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.05)
    body = json.dumps({"model": "demo-model", "messages": HI, "stream": True}).encode()
    call = http.send("POST", "/v1/chat/completions", [body], takes=2)
    reply = await asyncio.wait_for(call, 10)
    assert backend.closed.is_set()
    assert len(reply.parts) == 2
    assert not reply.complete


async def test_a_fault_of_a_route_is_a_plain_500(http, api, capsys):
    def broken():
        raise RuntimeError("CANARY")

    reply = await type(http)(create_app(api, readiness=broken)).get("/readyz")
    assert reply.status == 500
    assert reply.error["code"] == "internal"
    captured = capsys.readouterr()
    assert "CANARY" not in reply.body.decode() + captured.out + captured.err


async def test_large_bodies_are_answered_too(http, backend):
    filler = [{"role": "user", "content": "word " * 5000}]
    reply = await http.chat(messages=filler)
    assert reply.status == 200
    assert len(backend.jobs[0].prompt_token_ids) > 5000


async def test_many_requests_at_once_keep_their_own_answers(http, backend):
    replies = await asyncio.gather(
        *(http.complete([i + 100], stream=i % 2 == 0) for i in range(64))
    )
    assert all(reply.status == 200 and reply.complete for reply in replies)
    assert sorted(job.prompt_token_ids[0] for job in backend.jobs) == list(range(100, 164))
    assert len({job.request_id for job in backend.jobs}) == 64


class TestDeadline:
    @pytest.fixture
    def config(self):
        return ClusterConfig(gateway=GatewayConfig(default_timeout_s=5.0))

    async def test_the_job_has_what_is_left_of_the_time(self, http, backend):
        await http.complete("x")
        assert 0 < backend.jobs[0].remaining_s <= 5.0
