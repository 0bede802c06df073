"""Two gateways, two workers of each kind, and a load balancer that clients see alone."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from bench.lb.balancers import PROGRAMS, Balancer, balancing, installed
from bench.streams import StreamClient, generate
from core.config import DEFAULT_MODEL

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]

ANSWER_TOKENS = 24
CLIENTS = 6  # of each protocol, each with one request after another
BACK_S = 240.0
PROMPT = "The printing press"
SETTINGS = {
    "gateways": 2,
    "prefill_workers": 2,
    "decode_workers": 2,
    "drain_timeout_s": 60.0,
    # Past two health checks that fail, a second apart.
    "gateway": {"http_port": 0, "grpc_port": 0, "lame_duck_s": 4.0},
    "engine": {"prefill_kv_bytes": 2**28, "decode_kv_bytes": 2**28, "itl_target_s": 0.2},
}


class Load:
    """Clients that ask again and again while the block lasts. An answer is text, or an error."""

    def __init__(self, balancer: Balancer, token_ids: list[int]) -> None:
        self._balancer = balancer
        self._token_ids = token_ids
        self._over = threading.Event()
        self.answers: list[str] = []
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(2 * CLIENTS)
        self._running = [
            self._threads.submit(self._ask_on, ask)
            for ask in (self._over_http, self._over_grpc)
            for _ in range(CLIENTS)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for each in self._running:
            each.result(timeout=300)
        self._threads.shutdown()

    def _ask_on(self, ask: Any) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(ask())
            except Exception as error:
                self.errors.append(f"{ask.__name__}: {error!r}")

    def _over_http(self) -> str:
        body = {
            "model": DEFAULT_MODEL,
            "prompt": self._token_ids,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        url = f"http://127.0.0.1:{self._balancer.http}/v1/completions"
        text, done = "", False
        with httpx.stream("POST", url, json=body, timeout=300, trust_env=False) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read()!r}")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif line.startswith("data: "):
                    text += "".join(each["text"] for each in json.loads(data)["choices"])
        if not done:
            raise RuntimeError(f"the stream broke off behind {text!r}")
        return text

    def _over_grpc(self) -> str:
        request = generate(DEFAULT_MODEL, self._token_ids, max_tokens=ANSWER_TOKENS)
        with StreamClient(f"127.0.0.1:{self._balancer.grpc}", at_once=1) as client:
            stream = client.start(request, timeout_s=300).wait(300)
        if not stream.ok or stream.finished is None:
            raise RuntimeError(f"{stream.code}: {stream.details}")
        return stream.text


@pytest.fixture(scope="module")
def two(start_cluster, eventually):
    """A cluster with two gateways."""
    cluster = start_cluster(settings=SETTINGS, ready=False)
    eventually(lambda: "Ctrl-C" in cluster.stdout, "seven processes are up", timeout_s=600)
    return cluster


@pytest.fixture(params=PROGRAMS)
def balancer(request: pytest.FixtureRequest, two, eventually) -> Iterator[Balancer]:
    if installed(request.param) is None:
        pytest.skip(f"{request.param} is not installed: make test-deploy, apt-get install")
    names = ("gateway", "gateway-1")
    http, grpc = ([two._port(name, kind) for name in names] for kind in ("http", "grpc"))
    for port in http:
        eventually(lambda port=port: _ready(port), f"{port} is ready", timeout_s=BACK_S)
    with balancing(request.param, http=http, grpc=grpc) as running:
        eventually(lambda: _ready(running.http), "it balances", timeout_s=120)
        yield running


@pytest.fixture(scope="module")
def token_ids(encode) -> list[int]:
    return encode(PROMPT)


@pytest.fixture(scope="module")
def expected(two, token_ids) -> str:
    """The answer, from a gateway itself."""
    with two.client() as client:
        request = generate(DEFAULT_MODEL, token_ids, max_tokens=ANSWER_TOKENS)
        return client.start(request, timeout_s=300).wait(300).text


def _ready(port: int) -> bool:
    try:
        url = f"http://127.0.0.1:{port}/readyz"
        return httpx.get(url, timeout=20, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _served(cluster) -> Counter[str]:
    """Answers by the gateway that gave them."""
    asked = (each for each in cluster.events("request") if each.get("completion_tokens"))
    return Counter(each["process"] for each in asked)


def _restarted(cluster, eventually, name: str) -> None:
    pid = cluster.pids()[name]
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: cluster.has_replaced(name, pid), f"{name} is back", timeout_s=BACK_S)


def test_streams_spread_and_a_gateway_that_stops_loses_none(
    two, balancer, token_ids, expected, eventually
):
    before = _served(two)
    with Load(balancer, token_ids) as load:
        eventually(lambda: len(load.answers) >= 60 or load.errors, "sixty answers", timeout_s=400)
        spread = _served(two) - before
        shares = [spread[name] / max(1, spread.total()) for name in ("gateway", "gateway-1")]
        _restarted(two, eventually, "gateway")
        so_far = len(load.answers)
        eventually(
            lambda: len(load.answers) >= so_far + 12 or load.errors, "it goes on", timeout_s=400
        )
    assert load.errors == []
    assert set(load.answers) == {expected}
    assert min(shares) >= 0.4 and max(shares) <= 0.6, spread


def test_a_rolling_restart_of_everything_costs_no_client_anything(
    two, token_ids, expected, eventually
):
    names = ("gateway", "gateway-1")
    http, grpc = ([two._port(name, kind) for name in names] for kind in ("http", "grpc"))
    if installed("envoy") is None:
        pytest.skip("envoy is not installed: make test-deploy")
    with balancing("envoy", http=http, grpc=grpc) as balancer:
        eventually(lambda: _ready(balancer.http), "it balances", timeout_s=BACK_S)
        with Load(balancer, token_ids) as load:
            for name in ("decode-0", "decode-1", "prefill-0", "prefill-1", "scheduler", *names):
                so_far = len(load.answers)
                _restarted(two, eventually, name)
                eventually(
                    lambda so_far=so_far: len(load.answers) >= so_far + 12 or load.errors,
                    f"answers come behind the restart of {name}",
                    timeout_s=BACK_S,
                )
                assert load.errors == [], name
    print(f"{len(load.answers)} answers beside seven restarts")
    assert set(load.answers) == {expected}
    assert len(load.answers) >= 84
