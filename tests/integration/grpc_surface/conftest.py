"""A gRPC server on a real socket over a scripted cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from core.config import ClusterConfig, GatewayConfig
from core.messages import StopReason, TokenLogprobs
from engine.prepare import prepare
from gateway.api import InferenceApi
from gateway.auth import Everybody
from gateway.backend import TokenBatch
from gateway.grpc_gate import GrpcGate
from gateway.grpc_server import PublicGrpcServer
from gateway.grpc_service import InferenceService
from gateway.readiness import Readiness
from gateway.tokenizer import PromptTokenizer
from gateway.vllm_engine import VllmEngine
from protos.tandem.v1 import inference_pb2_grpc

TEXT = "Paris 🚀 is the capital."


class Scripted:
    """Says one text to everyone, in every choice; waits before the last token while `hold` is not
    set. Log probabilities, where they are asked for, are the token's id, negated and halved.

    `queue` holds requests up before their first token, `flood` makes an answer of that many tokens
    come at once, over and over, until the request is left.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._ids = tokenizer.encode_plain(TEXT)
        self.hold, self.queue = asyncio.Event(), asyncio.Event()
        self.hold.set()
        self.queue.set()
        self.flood = 0
        self.refusal: Exception | None = None
        self.jobs = []
        self.opened, self.closed = asyncio.Event(), asyncio.Event()
        self.stops = []

    @asynccontextmanager
    async def open(self, job):
        self.jobs.append(job)
        self.opened.set()
        self.closed.clear()
        try:
            if self.refusal is not None:
                raise self.refusal
            await self.queue.wait()
            yield self
        finally:
            self.opened.clear()
            self.closed.set()

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        while self.flood:
            yield TokenBatch(token_ids=self._ids * self.flood)
        job = self.jobs[-1]
        scored = _told(job.prompt_token_ids[1:]) if job.sampling.prompt_logprobs else ()
        for token_id in self._ids:
            for choice in range(job.num_choices):
                yield self._batch(job, token_id, choice=choice, prompt_logprobs=scored)
                scored = ()
        await self.hold.wait()
        for choice in range(job.num_choices):
            yield self._batch(job, 2, choice=choice, stop_reason=StopReason.EOS)

    def _batch(self, job, token_id, **more):
        logprobs = _told((token_id,)) if job.sampling.logprobs else ()
        return TokenBatch(token_ids=(token_id,), logprobs=logprobs, **more)

    def stop(self, reason, choice=None):
        self.stops.append(reason)


def _told(token_ids):
    return tuple(
        TokenLogprobs(logprob=-i / 2, top_token_ids=(i, 1), top_logprobs=(-i / 2, -99.0))
        for i in token_ids
    )


@pytest.fixture(scope="module")
def card():
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(card):
    return PromptTokenizer(card)


@pytest.fixture
def text():
    return TEXT


@pytest.fixture
def backend(tokenizer):
    return Scripted(tokenizer)


@pytest.fixture
def readiness():
    found = Readiness()
    found.say(None)
    return found


@pytest.fixture
def start(card, tokenizer, backend, readiness):
    """Starts a server with these settings; gives it and a stub."""

    @asynccontextmanager
    async def starting(options=(), **settings):
        config = GatewayConfig(grpc_port=0, **settings)
        cluster = ClusterConfig(gateway=config)
        api = InferenceApi.of_one(card, "demo", cluster, backend, tokenizer=tokenizer)
        services = [
            InferenceService(api),
            VllmEngine(api, card, cluster, readiness=readiness),
        ]
        server = PublicGrpcServer(services, config, interceptors=[GrpcGate(Everybody())])
        await server.start()
        await server.set_serving(True)
        target = f"127.0.0.1:{server.port}"
        try:
            async with grpc.aio.insecure_channel(target, options=options) as channel:
                yield server, channel, inference_pb2_grpc.InferenceServiceStub(channel)
        finally:
            await server.stop(1.0)
            api.close()

    return starting
