"""RB-O17: bodies and heads that are too large, too slow or not what they say, on real sockets."""

import asyncio
import gzip
import json
import socket
from contextlib import asynccontextmanager

import pytest

from core.config import ClusterConfig, GatewayConfig
from gateway import http_body, http_protocol, sse
from gateway.http_app import create_app
from gateway.servers import serve

BODY = json.dumps({"model": "demo-model", "prompt": "x", "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"


@pytest.fixture
def config():
    return ClusterConfig(gateway=GatewayConfig(http_port=0, grpc_port=0, max_body_bytes=64 * 1024))


@pytest.fixture
async def connect(api, config):
    """Opens connections to the server; its loop is the test's."""
    app = create_app(api, readiness=lambda: (True, ""))
    async with serve(config.gateway, app, [], drain_timeout_s=0.2) as serving:

        @asynccontextmanager
        async def opened():
            reader, writer = await asyncio.open_connection("127.0.0.1", serving.http_port)
            try:
                yield reader, writer
            finally:
                writer.close()

        yield opened


async def status(reader):
    line = await asyncio.wait_for(reader.readline(), 10)
    return int(line.split()[1])


@pytest.mark.parametrize(
    "framing, chunk",
    [
        (b"content-length: 104857600\r\n\r\n", b""),
        (b"transfer-encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n"),
        (b"transfer-encoding: chunked\r\n\r\n", b"6\r\nxxxxxx\r\n" * 512),
    ],
)
async def test_a_body_that_is_too_large_is_413(connect, backend, framing, chunk, monkeypatch):
    monkeypatch.setattr(http_body, "_LINGER_S", 0.05)
    async with connect() as (reader, writer):
        writer.write(HEAD + framing)
        for _ in range(40 if chunk else 0):
            writer.write(chunk)
        assert await status(reader) == 413
    assert backend.jobs == []


@pytest.mark.parametrize(
    "head", [b"x-large: " + b"x" * 2**20, b"\r\n".join(b"x-%d: 1" % i for i in range(10_000))]
)
async def test_a_head_that_is_too_large_is_431(connect, head):
    async with connect() as (reader, writer):
        writer.write(HEAD + head + b"\r\n\r\n")
        assert await status(reader) == 431


async def test_a_head_and_a_body_that_do_not_end_are_408(connect, backend, monkeypatch):
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_body, "_BODY_TIMEOUT_S", 0.1)
    async with connect() as (slow_head, writer), connect() as (slow_body, other):
        writer.write(HEAD)
        other.write(HEAD + b"content-length: 100\r\n\r\n{")
        assert await status(slow_head) == 408
        assert await status(slow_body) == 408
    assert backend.jobs == []


async def test_compressed_bodies_are_415(connect, backend):
    raw = gzip.compress(BODY + b" " * 2**20)
    async with connect() as (reader, writer):
        framing = b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(raw)
        writer.write(HEAD + framing + raw)
        assert await status(reader) == 415
    assert backend.jobs == []


async def test_a_client_that_reads_nothing_loses_its_job_and_no_other(
    connect, backend, tokenizer, monkeypatch
):
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.2)
    request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    backend.say("word " * 60_000)
    async with connect() as (reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader._transport.pause_reading()
        writer.write(request)
        await asyncio.wait_for(backend.opened.wait(), 10)
        await asyncio.wait_for(backend.closed.wait(), 30)
        backend.say("fine")
        async with connect() as (other, asking):
            asking.write(request)
            assert await status(other) == 200
            assert b"[DONE]" in await asyncio.wait_for(other.readuntil(b"[DONE]"), 10)
