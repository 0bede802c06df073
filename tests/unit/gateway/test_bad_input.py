"""Every bad input is a 4xx in OpenAI's shape that names the field, before any job is opened."""

import json
import socket
import time

import pytest

from core.config import ClusterConfig, EngineConfig, GatewayConfig
from gateway import http_body

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def no_job(backend):
    yield
    assert backend.jobs == []


def check(reply, status, param, code="invalid_request"):
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    error = reply.error
    assert error["param"] == param
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", 1e6),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", []),
        ("presence_penalty", "NaN"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e9),
        ("top_p", 0),
        ("top_p", 1.0000001),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "16"),
        ("max_tokens", True),
        ("max_tokens", 1e30),
        ("seed", 2**63),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1000.0),
        ("seed", "7"),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [str(i) for i in range(5000)]),
        ("stop", "x" * 1_000_000),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("stream", "true"),
        ("stream", 1),
        ("model", None),
        ("model", 5),
        ("model", ""),
    ],
)
async def test_wrong_values_name_their_field(http, field, value):
    for send in (http.chat, http.complete):
        started = time.perf_counter()
        check(await send(**{field: value}), 400, field)
        assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"stop": ["ok", None]}, "stop[1]"),
        ({"stop": ["", None]}, "stop[1]"),
        ({"stop_token_ids": [0, 49152]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        ({"stream": True, "stream_options": 5}, "stream_options"),
    ],
)
async def test_wrong_values_inside_name_their_path(http, fields, param):
    for send in (http.chat, http.complete):
        check(await send(**fields), 400, param)


async def test_the_two_names_of_the_limit_must_agree(http):
    reply = await http.chat(max_tokens=7, max_completion_tokens=5)
    check(reply, 400, "max_completion_tokens")
    check(await http.chat(max_completion_tokens=0), 400, "max_completion_tokens")


@pytest.mark.parametrize(
    "messages, param",
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": "user<|im_end|>", "content": "hi"}], "messages[0].role"),
        ([*MESSAGES, {"role": None, "content": "hi"}], "messages[1].role"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": 5, "text": "x"}]}], "messages[0].content[0].type"),
    ],
)
async def test_wrong_messages_name_their_path(http, messages, param):
    check(await http.chat(messages=messages), 400, param)


@pytest.mark.parametrize(
    "prompt, param",
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([True], "prompt[0]"),
        ([1, "x"], "prompt[1]"),
        ([1, 2.0], "prompt[1]"),
        ([1, 49152], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([2**70], "prompt[0]"),
        ("\x1d", "prompt"),  # the model has no token for it
    ],
)
async def test_wrong_prompts_name_their_path(http, prompt, param):
    check(await http.complete(prompt), 400, param)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2]], [[1], [2]]])
async def test_several_prompts_are_unsupported(http, prompt):
    check(await http.complete(prompt), 400, "prompt", "unsupported")


async def test_missing_fields_are_named(http):
    check(await http.post("/v1/chat/completions", {"model": "demo-model"}), 400, "messages")
    check(await http.post("/v1/chat/completions", {"messages": MESSAGES}), 400, "model")
    check(await http.post("/v1/completions", {"model": "demo-model"}), 400, "prompt")


@pytest.mark.parametrize("model", ["nope", "DEMO-MODEL ", "alias-of-demo", "demo-model\x00"])
async def test_an_unknown_model_is_not_found_and_the_served_one_named(http, model):
    for send in (http.chat, http.complete):
        error = check(await send(model=model), 404, "model", "model_not_found")
        assert "served: demo-model" in error["message"]


CHAT_ONLY = [
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
]
BOTH = [
    ("store", True),
    ("service_tier", "flex"),
    ("metadata", "x"),
    ("user", 5),
    ("guided_whitespace_pattern", "x"),
]
COMPLETION_ONLY = [
    ("suffix", "end"),
    ("best_of", 2),
]


@pytest.mark.parametrize("field, value", CHAT_ONLY + BOTH)
async def test_documented_chat_fields_are_refused_not_ignored(http, field, value):
    check(await http.chat(**{field: value}), 400, field, "unsupported")


@pytest.mark.parametrize("field, value", COMPLETION_ONLY + BOTH)
async def test_documented_completion_fields_are_refused_not_ignored(http, field, value):
    check(await http.complete(**{field: value}), 400, field, "unsupported")


@pytest.mark.parametrize(
    "field, value",
    [
        ("name", "Ann<|im_end|>"),
        ("function_call", {"name": "f"}),
        ("audio", {"id": "a"}),
        ("refusal", "no"),
    ],
)
async def test_documented_message_fields_are_refused_not_ignored(http, field, value):
    messages = [*MESSAGES, {"role": "assistant", "content": "x", field: value}]
    check(await http.chat(messages=messages), 400, f"messages[1].{field}", "unsupported")


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1:6379/",
        "file:///etc/passwd",
        "http://[::1]/",
        "http://internal-scheduler:50051/",
    ],
)
async def test_content_that_points_elsewhere_is_refused_and_not_fetched(http, monkeypatch, url):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    content = [
        {"type": "text", "text": "describe"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    error = check(await http.chat(content), 400, "messages[0].content[1].type", "unsupported")
    assert "image_url" in error["message"]


@pytest.mark.parametrize(
    "raw, param",
    [
        (
            b'{"model":"demo-model","messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
            "temperature",
        ),
        (b'{"model":"demo-model","prompt":"x","top_p":-Infinity}', "top_p"),
        (b'{"model":"demo-model","prompt":"x","temperature":1e999}', "temperature"),
        (
            rb'{"model":"demo-model","messages":[{"role":"user","content":"a\ud800b"}]}',
            "messages[0].content",
        ),
        (b'{"model":"demo-model","messages":[{"role":"user","content":"\xff\xfe"}]}', None),
        ('{"model":"demo-model"}'.encode("utf-16"), None),
        (b'{"temperature":0,"temperature":2}', "temperature"),
        (b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}", None),
        (b"[]", None),
        (b"", None),
        (b'{"model":', None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bodies_that_are_no_request(http, path, raw, param):
    check(await http.post(path, raw), 400, param)


async def test_a_body_beyond_the_limit_is_refused_while_it_is_read(http, monkeypatch):
    monkeypatch.setattr(http_body, "_LINGER_S", 0.01)
    limit = GatewayConfig().max_body_bytes
    big = await http.send("POST", "/v1/chat/completions", [b"x" * 65_536] * 200)
    check(big, 413, None, "request_too_large")
    declared = {"content-length": str(100 * 2**20)}
    early = await http.send("POST", "/v1/completions", [b"{}"], headers=declared)
    check(early, 413, None, "request_too_large")
    lied = await http.send(
        "POST", "/v1/completions", [b"x" * (limit + 1)], headers={"content-length": "2"}
    )
    check(lied, 413, None, "request_too_large")
    assert lied.headers["connection"] == "close"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "gzip"},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=utf-16"},
    ],
)
async def test_bodies_of_another_kind_are_unsupported_media(http, headers):
    reply = await http.post("/v1/completions", b"{}", headers=headers)
    check(reply, 415, None, "unsupported_media_type")


@pytest.mark.parametrize("label", ["", "x" * 129, "caf\u00e9", "a\tb"])
async def test_a_request_id_that_could_not_be_echoed_is_refused(http, label):
    body = {"model": "demo-model", "prompt": "x"}
    reply = await http.post("/v1/completions", body, headers={"x-request-id": label})
    check(reply, 400, "X-Request-Id")


async def test_routes_and_methods_that_are_not_there(http):
    check(await http.get("/v1/nothing"), 404, None, "not_found")
    reply = await http.get("/v1/completions")
    check(reply, 405, None, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    check(await http.get("/v1/models/other"), 404, "model", "model_not_found")


class TestSmallWindow:
    @pytest.fixture
    def config(self):
        return ClusterConfig(engine=EngineConfig(max_model_len=64))

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_prompt_without_room_for_an_answer_states_both_numbers(self, http, stream):
        error = check(
            await http.complete([100] * 64, stream=stream), 400, "prompt", "context_length_exceeded"
        )
        assert "64 tokens" in error["message"] and "window of 64" in error["message"]
        long = await http.chat("word " * 80, stream=stream)
        check(long, 400, "messages", "context_length_exceeded")

    @pytest.mark.parametrize("limit", [2, 4294967297])
    @pytest.mark.parametrize("stream", [True, False])
    async def test_an_answer_that_cannot_fit_is_not_clamped(self, http, stream, limit):
        reply = await http.complete([100] * 63, max_tokens=limit, stream=stream)
        error = check(reply, 400, "max_tokens", "context_length_exceeded")
        assert "63 tokens" in error["message"] and "window of 64" in error["message"]
        reply = await http.chat("hi", max_completion_tokens=60, stream=stream)
        check(reply, 400, "max_completion_tokens", "context_length_exceeded")

    async def test_what_can_never_fit_is_refused_without_tokenising(self, http):
        started = time.perf_counter()
        for send, param in ((http.chat, "messages"), (http.complete, "prompt")):
            error = check(await send("x" * 1_000_000), 400, param, "context_length_exceeded")
            assert "at least" in error["message"]
        many = [{"role": "user", "content": "a"}] * 100
        check(await http.chat(messages=many), 400, "messages", "context_length_exceeded")
        assert time.perf_counter() - started < 2.0


class TestStrictFields:
    @pytest.fixture
    def config(self):
        return ClusterConfig(gateway=GatewayConfig(strict_fields=True))

    async def test_unknown_fields_are_refused_by_name(self, http):
        check(await http.chat(max_token=5), 400, "max_token")
        check(await http.complete(**{"a\r\nb": 5}), 400, "a??b")
        messages = [{"role": "user", "content": "hi", "mood": "good"}]
        check(await http.chat(messages=messages), 400, "messages[0].mood")


async def test_no_error_quotes_what_the_client_sent(http, capsys):
    canary = "CANARY-8861"
    bodies = [
        {"model": canary, "messages": MESSAGES},
        {"model": "demo-model", "messages": [{"role": canary, "content": canary}]},
        {"model": "demo-model", "messages": [{"role": "user", "content": {"x": canary}}]},
        {"model": "demo-model", "messages": MESSAGES, "temperature": canary, "top_p": canary},
        {"model": "demo-model", "messages": MESSAGES, "tools": [canary]},
        {"model": "demo-model", "messages": MESSAGES, "stop": [canary, ""]},
        {"model": "demo-model", "messages": MESSAGES, "response_format": {"type": canary}},
    ]
    replies = [await http.post("/v1/chat/completions", body) for body in bodies]
    replies.append(await http.post("/v1/chat/completions", json.dumps(bodies[0]).encode()[:-1]))
    for reply in replies:
        assert 400 <= reply.status < 500
        assert canary not in reply.body.decode() + str(reply.headers)
    captured = capsys.readouterr()
    assert canary not in captured.out + captured.err
