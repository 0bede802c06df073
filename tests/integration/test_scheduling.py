"""The scheduler's promises on a real cluster: shares, early refusals, priorities, explanations."""

import asyncio
import contextlib
import json
import statistics

import httpx
import pytest

from core.api_keys import KeyEntry, entry_toml, hash_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
NUM_GUESTS = 8
FLOOD = 24


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(
        "".join(
            entry_toml(KeyEntry(id=id, hash=hash_of(f"tdm-{id}"), tenant=id, max_priority=most))
            for id, most in (("flood", 0), ("guest", 5))
        )
    )
    made = start_cluster(
        settings={
            "gateway": {"api_keys_file": str(keys)},
            "scheduler": {"report_interval_s": 0.2},
            "engine": {"prefix_cache": False, "max_seqs": 8},
        }
    )
    yield made
    made.close()


def client(cluster):
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=cluster.http_url, timeout=120, trust_env=False, limits=limits)


def request(key, words, *, max_tokens=8, **more):
    text = " ".join(f"word{(words * 31 + n) % 997}" for n in range(words))
    return {
        "url": "/v1/completions",
        "json": {
            "model": MODEL,
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        },
        "headers": {"authorization": f"Bearer tdm-{key}"},
    }


async def timing(http, asked):
    response = await http.post(**asked)
    assert response.status_code == 200
    return response.json()["timing"]


async def guests(http):
    asked = [
        request("guest", 150 + n, max_tokens=1, include_timing=True) for n in range(NUM_GUESTS)
    ]
    return [await timing(http, each) for each in asked]


@contextlib.asynccontextmanager
async def flooded(http):
    """Some requests always wait, of short prompts and answers."""

    async def ask_again_and_again(number):
        while True:
            await http.post(**request("flood", 12 + number, max_tokens=12))

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask_again_and_again(n)) for n in range(FLOOD)]
        await asyncio.sleep(0)
        yield
        for task in asking:
            task.cancel()


def p90(values):
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def slowdown(timing):
    """By what factor waiting made the first token late. What others take of the machine's cores
    makes computing slower as well, and is not the scheduler's."""
    waited_s = timing["queue_s"] + timing["prefill_wait_s"]
    return timing["ttft_s"] / (timing["ttft_s"] - waited_s)


def test_a_tenant_waits_little_though_another_floods(cluster, eventually):
    async def measure():
        async with client(cluster) as http:
            await guests(http)
            async with flooded(http):
                await http.post(**request("flood", 8))  # it is under way
                await guests(http)  # and the scheduler has seen how the workers keep up with it
                return await guests(http)

    beside = asyncio.run(measure())
    assert p90([slowdown(each) for each in beside]) <= 1.5
    eventually(cluster.is_at_rest, "no block is held", timeout_s=30)


def test_an_explanation_comes_to_whoever_asks_and_a_priority_is_bounded_by_the_key(cluster):
    async def ask():
        async with client(cluster) as http:
            asked = request("guest", 20, priority=-5)
            asked["headers"]["x-tandem-explain"] = "1"
            return (
                await http.post(**asked),
                await http.post(**request("guest", 20)),
                await http.post(**request("flood", 20, priority=-1)),
            )

    explained, silent, refused = asyncio.run(ask())
    assert explained.status_code == silent.status_code == 200
    told = json.loads(explained.headers["x-tandem-explain"])
    assert told["candidates"][0]["decode"].startswith("decode-0/")
    assert told["reason"]
    assert "x-tandem-explain" not in silent.headers
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
