"""A gateway dies in the middle of a stream, and its client goes on with it at another one."""

import json
import os
import signal

import httpx
import pytest

from bench.redis_server import BINARY, redis_server

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.timeout(900),
    pytest.mark.skipif(BINARY is None, reason="no redis-server: apt-get install redis-server"),
]
BODY = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Tell me of the rivers of France."}],
    "max_tokens": 120,
    "temperature": 0.7,
    "top_k": 20,
    "stream": True,
}
READ_BEFORE = 20


@pytest.fixture(scope="module")
def cluster(start_cluster):
    with redis_server() as redis:
        settings = {"redis": {"url": redis.url}, "gateway": {"resume": True}, "gateways": 2}
        yield start_cluster(settings=settings)


def url(cluster, name):
    port = json.loads((cluster.run_dir / f"{name}.json").read_text())["http"]
    return f"http://127.0.0.1:{port}/v1/chat/completions"


def read(target, body, *, last=None, until=None):
    """The last id and the text of a stream, until so many events came or it ended."""
    headers = {} if last is None else {"Last-Event-ID": last}
    text, seen, done = "", 0, False
    with httpx.stream(
        "POST", target, json=body, headers=headers, timeout=120, trust_env=False
    ) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                text += delta.get("content", "")
                seen += 1
                if seen == until:
                    break
    return last, text, done


def test_a_stream_goes_on_at_another_gateway_with_the_same_text(cluster, eventually):
    seeded = {**BODY, "seed": 11}
    _, whole, done = read(url(cluster, "gateway-1"), seeded)
    assert done
    # The first gateway dies while the answer is on its way.
    target, text, last = url(cluster, "gateway"), "", None
    with (
        httpx.Client(timeout=120, trust_env=False) as client,
        pytest.raises(httpx.TransportError),
        client.stream("POST", target, json=seeded) as reply,
    ):
        seen = 0
        for line in reply.iter_lines():
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line.startswith("data: "):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                text += delta.get("content", "")
                seen += 1
                if seen == READ_BEFORE:
                    os.kill(cluster.pids()["gateway"], signal.SIGKILL)
    assert last is not None
    _, rest, done = read(url(cluster, "gateway-1"), seeded, last=last)
    assert done
    assert text + rest == whole
    eventually(cluster.is_at_rest, "every block is back", timeout_s=120)


def test_a_drawn_seed_is_kept(cluster):
    target = url(cluster, "gateway-1")
    last, text, _ = read(target, BODY, until=READ_BEFORE)
    _, rest, done = read(target, BODY, last=last)
    assert done
    # Of the request's own seed nobody was told, and the record tells the same once more.
    _, again, _ = read(target, BODY, last=last)
    assert rest == again != text
