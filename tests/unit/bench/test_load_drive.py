"""When requests are sent. The client here answers at once, or when the test lets it."""

import asyncio
import time

from bench.load.drive import closed_loop, open_loop
from bench.load.request import LoadRequest, Record

REQUESTS = [LoadRequest(prompt=str(i), max_tokens=1) for i in range(7)]


class Client:
    """Answers each request once `go` is set; remembers how many ran at once."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        self.go = asyncio.Event()
        self.running = self.most_running = 0
        self.all_sent = asyncio.Event()
        self.expected = 0

    def encode(self, request: LoadRequest) -> bytes:
        return str(request.prompt).encode()

    async def send(self, encoded: bytes, intended_s: float, max_tokens: int) -> Record:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running == self.expected:
            self.all_sent.set()
        sent_s = time.perf_counter() - self.begin_s
        await self.go.wait()
        self.running -= 1
        return Record(
            intended_s=intended_s,
            sent_s=sent_s,
            token_times_s=(sent_s,),
            finished_s=sent_s,
            max_tokens=max_tokens,
            completion_tokens=1,
            prompt_tokens=int(encoded),
        )


async def test_a_closed_loop_keeps_its_concurrency_and_sends_everything_once():
    client = Client()
    client.expected = 3
    load = asyncio.create_task(closed_loop(client, REQUESTS, concurrency=3))
    await client.all_sent.wait()
    client.go.set()
    records = await load
    assert client.most_running == 3
    assert sorted(record.prompt_tokens for record in records) == list(range(7))


async def test_an_open_loop_sends_on_whatever_comes_back():
    client = Client()
    client.expected = len(REQUESTS)
    arrivals_s = [0.001 * i for i in range(7)]
    load = asyncio.create_task(open_loop(client, REQUESTS, arrivals_s))
    await client.all_sent.wait()  # while not one has been answered
    client.go.set()
    records = await load
    assert [record.intended_s for record in records] == arrivals_s
    assert [record.prompt_tokens for record in records] == list(range(7))
    assert all(record.sent_s >= record.intended_s for record in records)


async def test_a_client_that_was_held_up_keeps_the_intended_times():
    client = Client()
    client.go.set()
    load = asyncio.create_task(open_loop(client, REQUESTS, [0.01] * 7))
    await asyncio.sleep(0)  # the load has begun and waits for its first time
    time.sleep(0.05)  # noqa: ASYNC251 - the loop stands still, which is what is tested
    records = await load
    assert {record.intended_s for record in records} == {0.01}
    assert min(record.ttft_s for record in records) >= 0.03
