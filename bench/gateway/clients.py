"""Clients that read as little as can be: what they cost is not measured, but shares the machine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc

from bench.gateway.server import MODEL
from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1 import inference_pb2_grpc

# Streams on one HTTP/2 connection; more connections keep the server's own bound out of the way.
_STREAMS_PER_CHANNEL = 64


@asynccontextmanager
async def sse_streams(port: int, count: int, max_tokens: int) -> AsyncIterator[None]:
    """So many streamed chats over HTTP, each with its first token there; read until left."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me of the printing press."}],
            "stream": True,
            "max_tokens": max_tokens,
        }
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    async with AsyncExitStack() as held:
        tasks = await held.enter_async_context(asyncio.TaskGroup())
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            held.callback(writer.close)
            writer.write(request)
            readers.append(reader)
        await asyncio.gather(*(reader.readuntil(b'"content":"') for reader in readers))
        reading = [tasks.create_task(_drain(reader)) for reader in readers]
        yield
        for task in reading:
            task.cancel()


@asynccontextmanager
async def grpc_streams(port: int, count: int, max_tokens: int) -> AsyncIterator[None]:
    """The same over gRPC."""
    request = pb.ChatRequest(
        model=MODEL,
        messages=[pb.ChatMessage(role="user", content="Tell me of the printing press.")],
        sampling=pb.SamplingOptions(max_tokens=max_tokens),
    )
    async with AsyncExitStack() as held:
        tasks = await held.enter_async_context(asyncio.TaskGroup())
        calls = []
        options = [("grpc.use_local_subchannel_pool", 1)]
        for first in range(0, count, _STREAMS_PER_CHANNEL):
            channel = await held.enter_async_context(
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            )
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls += [stub.Chat(request) for _ in range(min(_STREAMS_PER_CHANNEL, count - first))]
        await asyncio.gather(*(call.read() for call in calls))
        reading = [tasks.create_task(_drain_call(call)) for call in calls]
        yield
        for call, task in zip(calls, reading, strict=True):
            call.cancel()
            task.cancel()


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


async def _drain_call(call: grpc.aio.UnaryStreamCall) -> None:  # type: ignore[type-arg]
    while await call.read() is not grpc.aio.EOF:
        pass
