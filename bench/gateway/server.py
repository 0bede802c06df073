"""The measured process: the gateway's own servers over a scripted source, and its meters."""

import asyncio
import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from bench.gateway.source import ScriptedSource
from bench.parity_prompts import PROSE
from core.config import ClusterConfig, GatewayConfig
from core.model_card import ModelCard
from gateway.api import InferenceApi
from gateway.auth import Everybody
from gateway.grpc_gate import GrpcGate
from gateway.grpc_service import InferenceService
from gateway.http_app import create_app
from gateway.ledger import Ledger
from gateway.openai_request import read_chat
from gateway.servers import serve
from gateway.tokenizer import PromptTokenizer

MODEL = "scripted"
TICK_S = 0.05


def run(control: Connection, card_folder: str) -> None:
    """The process's main: serves until told to end."""
    with open(os.devnull, "w") as nowhere:  # the access log is written, as in production
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(nowhere))
        asyncio.run(_Measured(control, ModelCard.load(Path(card_folder))).serve())


class _Measured:
    def __init__(self, control: Connection, card: ModelCard) -> None:
        self._control = control
        tokenizer = PromptTokenizer(card)
        self._source = ScriptedSource(tokenizer.encode_plain(PROSE))
        gateway = GatewayConfig(http_port=0, grpc_port=0)
        self._config = ClusterConfig(gateway=gateway, served_name=MODEL)
        self._api = InferenceApi.of_one(
            card, MODEL, self._config, self._source, tokenizer=tokenizer
        )

    async def serve(self) -> None:
        """Serves, and answers the other process's orders one by one."""
        authenticator = Everybody()
        app = create_app(self._api, readiness=lambda: (True, ""), authenticator=authenticator)
        services = [InferenceService(self._api)]
        gate = GrpcGate(authenticator)
        loop = asyncio.get_running_loop()
        orders: dict[str, Callable[..., Awaitable[Any]]] = {
            "stream": self._stream,
            "rss": self._rss,
            "prepare": self._prepare,
        }
        async with AsyncExitStack() as held:
            held.callback(self._api.close)
            serving = await held.enter_async_context(
                serve(self._config.gateway, app, services, drain_timeout_s=1.0, interceptors=[gate])
            )
            self._control.send({"http": serving.http_port, "grpc": serving.grpc_port})
            while True:
                name, arguments = await loop.run_in_executor(None, self._control.recv)
                if name == "end":
                    return
                self._control.send(await orders[name](**arguments))

    async def _stream(self, ticks: int) -> dict[str, float]:
        """CPU seconds of this process per token, over so many ticks at their pace."""
        source = self._source
        began, cpu_s = source.num_batches, time.process_time()
        next_s = time.monotonic()
        for _ in range(ticks):
            source.tick()
            next_s += TICK_S
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        tokens = source.num_batches - began
        used_s = time.process_time() - cpu_s
        return {"tokens": tokens, "cpu_us_per_token": used_s / tokens * 1e6 if tokens else 0.0}

    async def _rss(self) -> int:
        """Bytes in memory, garbage aside."""
        gc.collect()
        with open("/proc/self/statm") as statm:  # noqa: ASYNC230 (the kernel's own memory)
            return int(statm.read().split()[1]) * resource.getpagesize()

    async def _prepare(self, body: str, rounds: int) -> dict[str, float]:
        """Milliseconds from a chat's body to its job: validated, rendered, tokenised.

        `cpu_ms` is that of all threads.
        """
        raw = body.encode()
        took_ms: list[float] = []
        cpu_ms: list[float] = []
        tokens = 0
        for _ in range(rounds):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            asked = read_chat(raw, strict=False)
            async with self._api.chat(asked.input, ledger=Ledger()) as stream:
                took_ms.append((time.perf_counter() - began_s) * 1e3)
                cpu_ms.append((time.process_time() - began_cpu_s) * 1e3)
                tokens = stream.usage.prompt_tokens
        return {
            "prompt_tokens": tokens,
            "ms": statistics.median(took_ms),
            "cpu_ms": statistics.median(cpu_ms),
        }


def chat_of(num_words: int) -> str:
    """A chat's body of about so many words: a system turn, and questions and answers of fifty."""
    words = (PROSE * (num_words // len(PROSE.split()) + 1)).split()[:num_words]
    turns = [" ".join(words[i : i + 50]) for i in range(0, num_words, 50)]
    roles = ["system", *["user", "assistant"] * len(turns)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16})
