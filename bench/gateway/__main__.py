"""`python -m bench.gateway`: CPU per streamed token, time to a prompt, memory of idle streams.

The gateway's own servers run in a process of their own, over a source that gives every stream a
token each 50 ms, as an engine's steps do. Its CPU time is the whole process's: sockets, protocol,
session, detokenisation. Rounds of SSE and gRPC alternate. Ends with one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from bench.gateway.clients import grpc_streams, sse_streams
from bench.gateway.server import TICK_S, chat_of, run
from core.config import DEFAULT_MODEL

STREAMS = 64
IDLE_STREAMS = 1000
GOALS = {
    "sse_cpu_us_per_token": 150.0,
    "grpc_cpu_us_per_token": 100.0,
    "prepare_ms": 5.0,
    "sse_idle_mb": 150.0,
    "grpc_idle_mb": 150.0,
}
_WARM_TICKS = 20
_PREPARE_ROUNDS = 200
_WORDS = 775  # with the template about a thousand tokens
_ORDER_TIMEOUT_S = 120.0
Streams = Callable[[int, int, int], AbstractAsyncContextManager[None]]
CLIENTS: dict[str, Streams] = {"sse": sse_streams, "grpc": grpc_streams}


class Gateway:
    """The measured process, as this one sees it."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self.ports: dict[str, int] = {}

    async def ready(self) -> None:
        """Until it serves."""
        bound = await self._receive()
        self.ports = {"sse": bound["http"], "grpc": bound["grpc"]}

    async def order(self, name: str, **arguments: Any) -> Any:
        """Gives one order, and its answer back."""
        self._control.send((name, arguments))
        return await self._receive()

    async def _receive(self) -> Any:
        async with asyncio.timeout(_ORDER_TIMEOUT_S):
            return await asyncio.to_thread(self._control.recv)


@asynccontextmanager
async def started(card_folder: str) -> AsyncIterator[Gateway]:
    """A process that nothing was measured in yet."""
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, card_folder))
    process.start()
    theirs.close()
    try:
        gateway = Gateway(control)
        await gateway.ready()
        yield gateway
        control.send(("end", {}))
        await asyncio.to_thread(process.join, 10)
    finally:
        process.kill()
        process.join()


async def measure(card_folder: str, rounds: int, ticks: int) -> dict[str, Any]:
    """Everything, by name."""
    found: dict[str, Any] = {"streams": STREAMS, "tick_ms": TICK_S * 1e3}
    async with started(card_folder) as gateway:
        taken: dict[str, list[float]] = {name: [] for name in CLIENTS}
        for _ in range(rounds):
            for name in CLIENTS:
                taken[name].append(await _cpu_us_per_token(gateway, name, ticks))
        for name, each in taken.items():
            found[f"{name}_cpu_us_per_token"] = round(statistics.median(each), 1)
            found[f"{name}_rounds"] = [round(value, 1) for value in each]
        prepared = await gateway.order("prepare", body=chat_of(_WORDS), rounds=_PREPARE_ROUNDS)
        say(f"a chat of {prepared['prompt_tokens']} tokens: {prepared['ms']:.2f} ms to its job")
        found["prepare_tokens"] = prepared["prompt_tokens"]
        found["prepare_ms"] = round(prepared["ms"], 2)
        found["prepare_cpu_ms"] = round(prepared["cpu_ms"], 2)
    found["idle_streams"] = IDLE_STREAMS
    for name in CLIENTS:
        async with started(card_folder) as gateway:  # memory that was freed is memory that is had
            found[f"{name}_idle_mb"] = round(await _idle_mb(gateway, name), 1)
    return found


async def _cpu_us_per_token(gateway: Gateway, name: str, ticks: int) -> float:
    async with CLIENTS[name](gateway.ports[name], STREAMS, ticks + 2 * _WARM_TICKS):
        await gateway.order("stream", ticks=_WARM_TICKS)
        found = await gateway.order("stream", ticks=ticks)
    # Less where the gateway did not keep up with the ticks.
    assert found["tokens"] > 0.9 * STREAMS * ticks, found
    say(f"{name}: {found['cpu_us_per_token']:.1f} us of CPU a token")
    return float(found["cpu_us_per_token"])


async def _idle_mb(gateway: Gateway, name: str) -> float:
    streams, port = CLIENTS[name], gateway.ports[name]
    async with streams(port, 1, 3):  # what is made once, is made
        pass
    base = await gateway.order("rss")
    async with streams(port, IDLE_STREAMS, 3):
        taken = float(await gateway.order("rss") - base) / 1e6
    say(f"{name}: {IDLE_STREAMS} idle streams take {taken:.0f} MB")
    return taken


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measures; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=100, help="tokens of each stream in a round")
    args = parser.parse_args()
    prepared = subprocess.run(
        [sys.executable, "-m", "engine.prepare", DEFAULT_MODEL], stdout=subprocess.PIPE, check=True
    )
    folder = prepared.stdout.decode().strip()
    found = asyncio.run(measure(folder, args.rounds, args.ticks))
    missed = [name for name, most in GOALS.items() if found[name] > most]
    print(json.dumps({**found, "goals": GOALS, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
