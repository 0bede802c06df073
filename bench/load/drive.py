"""Two ways to send a load: as answers come back, and as the clock says."""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence

from bench.load.client import LoadClient
from bench.load.request import LoadRequest, Record


async def closed_loop(
    client: LoadClient, requests: Sequence[LoadRequest], *, concurrency: int
) -> list[Record]:
    """Keeps so many requests running; each is meant to be sent the moment another has ended."""
    encoded = [(client.encode(request), request.max_tokens) for request in requests]
    waiting = iter(encoded)
    records: list[Record] = []
    client.begin_s = time.perf_counter()

    async def user(turns: Iterator[tuple[bytes, int]]) -> None:
        for data, max_tokens in turns:
            intended_s = time.perf_counter() - client.begin_s
            records.append(await client.send(data, intended_s, max_tokens))

    async with asyncio.TaskGroup() as users:
        for _ in range(min(concurrency, len(encoded))):
            users.create_task(user(waiting))
    return records


async def open_loop(
    client: LoadClient, requests: Sequence[LoadRequest], arrivals_s: Sequence[float]
) -> list[Record]:
    """Sends each request at its time after the begin, however many still run.

    The schedule is absolute: a late request delays none after it, and latency counts from when it
    was to be sent, so that a server which holds the client up does not hide it.
    """
    encoded = [(client.encode(request), request.max_tokens) for request in requests]
    client.begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as running:
        tasks = []
        for (data, max_tokens), intended_s in zip(encoded, arrivals_s, strict=True):
            early_s = intended_s - (time.perf_counter() - client.begin_s)
            if early_s > 0:
                await asyncio.sleep(early_s)
            tasks.append(running.create_task(client.send(data, intended_s, max_tokens)))
    return [task.result() for task in tasks]


def poisson_arrivals(chances: Sequence[float], rate: float) -> list[float]:
    """Seconds at which requests of a Poisson process arrive, the first at 0.

    `rate` is a mean per second; `chances` has a draw in [0, 1) for each gap, so one more request.
    """
    times = [0.0]
    for chance in chances:
        times.append(times[-1] - math.log(1.0 - chance) / rate)
    return times
