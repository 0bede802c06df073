"""Both public servers on real sockets, over a scripted cluster."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from core.config import ClusterConfig, GatewayConfig
from core.errors import ConfigError
from core.messages import StopReason
from engine.prepare import prepare
from gateway import http_protocol
from gateway.api import InferenceApi
from gateway.backend import TokenBatch
from gateway.grpc_service import InferenceService
from gateway.http_app import create_app
from gateway.servers import serve
from gateway.tokenizer import PromptTokenizer

TEXT = "Paris 🚀 is the capital."


class Scripted:
    """Says one text to everyone; waits before the last token while `hold` is not set."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._ids = tokenizer.encode_plain(TEXT)
        self.hold = asyncio.Event()
        self.hold.set()
        self.open_jobs = 0
        self.opened = asyncio.Event()
        self.all_closed = asyncio.Event()

    @asynccontextmanager
    async def open(self, job):
        self.open_jobs += 1
        self.opened.set()
        self.all_closed.clear()
        try:
            yield self
        finally:
            self.open_jobs -= 1
            if not self.open_jobs:
                self.all_closed.set()

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        for token_id in self._ids:
            yield TokenBatch(token_ids=(token_id,))
        await self.hold.wait()
        yield TokenBatch(token_ids=(2,), stop_reason=StopReason.EOS)

    def stop(self, reason, choice=None):
        raise AssertionError("nobody asked for a stop string")


@pytest.fixture(scope="module")
def card():
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(card):
    return PromptTokenizer(card)


@pytest.fixture
def backend(tokenizer):
    return Scripted(tokenizer)


@pytest.fixture
def api(card, tokenizer, backend):
    made = InferenceApi.of_one(card, "demo", ClusterConfig(), backend, tokenizer=tokenizer)
    yield made
    made.close()


@asynccontextmanager
async def running(api, **config):
    settings = GatewayConfig(**{"http_port": 0, "grpc_port": 0} | config)
    app = create_app(api, readiness=lambda: (True, ""))
    async with serve(settings, app, [InferenceService(api)], drain_timeout_s=2.0) as serving:
        yield serving


def taken_port():
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


async def test_the_openai_client_streams_unchanged(api, tokenizer):
    async with running(api) as serving:
        url = f"http://127.0.0.1:{serving.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
            assert chunks[-1].usage.completion_tokens == len(tokenizer.encode_plain(TEXT)) + 1
            whole = await client.completions.create(model="demo", prompt="x")
            assert whole.choices[0].text == TEXT
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="demo", prompt="")
            assert caught.value.param == "prompt"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("nope")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_client_that_hangs_up_ends_the_job(api, backend, stream):
    backend.hold.clear()
    async with running(api) as serving:
        body = b'{"model":"demo","prompt":"x","stream":%s}' % (b"true" if stream else b"false")
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http_port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        if stream:
            await asyncio.wait_for(reader.readuntil(b"data: "), 30)
        else:
            await asyncio.wait_for(backend.opened.wait(), 30)
        writer.transport.abort()
        await asyncio.wait_for(backend.all_closed.wait(), 30)


@pytest.mark.parametrize("field", ["http_port", "grpc_port"])
async def test_a_port_in_use_is_one_clear_error_before_anything_starts(api, field):
    listener, port = taken_port()
    with contextlib.closing(listener), pytest.raises(ConfigError) as caught:
        async with running(api, **{field: port}):
            raise AssertionError("the servers started")
    assert caught.value.message == f"port {port} on 127.0.0.1 is in use (gateway.{field})"


async def test_leaving_waits_for_what_runs(api, backend):
    backend.hold.clear()
    async with httpx.AsyncClient(timeout=10) as client:
        async with running(api) as serving:
            url = f"http://127.0.0.1:{serving.http_port}/v1/completions"
            call = asyncio.create_task(client.post(url, json={"model": "demo", "prompt": "x"}))
            await asyncio.wait_for(backend.opened.wait(), 30)
            asyncio.get_running_loop().call_later(0.3, backend.hold.set)
        assert (await call).json()["choices"][0]["text"] == TEXT


async def test_ports_are_free_again_afterwards(api):
    async with running(api) as serving:
        ports = (serving.http_port, serving.grpc_port)
    async with running(api, http_port=ports[0], grpc_port=ports[1]) as again:
        assert (again.http_port, again.grpc_port) == ports


async def test_a_body_beyond_the_limit_is_413_on_the_wire(api):
    async with running(api) as serving, httpx.AsyncClient(timeout=10) as client:
        url = f"http://127.0.0.1:{serving.http_port}/v1/completions"

        async def endless():
            for _ in range(200):
                yield b"x" * 65_536

        headers = {"content-type": "application/json"}
        reply = await client.post(url, content=endless(), headers=headers)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


async def test_an_error_of_the_body_comes_out_as_it_is(api):
    with pytest.raises(ConfigError, match="mine"):
        async with running(api):
            raise ConfigError("mine")


async def raw(port, data):
    """Sends bytes and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head, status",
    [
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 100_000, 431),
        (b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 30_000 + b"\r\n", 431),
        (b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    ],
)
async def test_heads_are_bounded(api, head, status):
    async with running(api) as serving:
        reply = await raw(serving.http_port, head)
        assert reply.startswith(b"HTTP/1.1 %d " % status)
        body = json.loads(reply.partition(b"\r\n\r\n")[2])
        assert body["error"]["type"] == "invalid_request_error"


async def test_a_head_that_does_not_end_is_timed_out(api, monkeypatch):
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.1)
    async with running(api) as serving:
        for data in (b"", b"GET /healthz HTTP/1.1\r\nx:"):
            assert (await raw(serving.http_port, data)).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_serves_many_requests(api):
    async with running(api) as serving:
        request = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        reply = await raw(serving.http_port, request * 3 + last)
        assert reply.count(b"HTTP/1.1 200 ") == 4
