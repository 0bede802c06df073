"""Without a prefill worker, from the start or of a sudden, the decode workers read the prompts."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from bench.parity_prompts import PROSE
from bench.streams import generate

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

MODEL = "smollm2-135m-instruct"
NUM_STREAMS = 4
PROMPT_TOKENS = 600
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def pair(start_cluster) -> Iterator:
    """One worker of each kind. Without a prefix cache each prompt is read anew, in many steps."""
    cluster = start_cluster(
        settings={
            "scheduler": {"report_interval_s": 0.1},
            "engine": {"max_step_tokens": 64, "prefix_cache": False},
        }
    )
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def asks(encode) -> list:
    prose = encode(PROSE * 12)
    return [
        generate(
            MODEL, prose[shift : shift + PROMPT_TOKENS], max_tokens=ANSWER_TOKENS, ignore_eos=True
        )
        for shift in range(NUM_STREAMS)
    ]


def placements(cluster) -> dict[str, int]:
    answer = httpx.get(f"{cluster.admin_url}/cluster", timeout=10, trust_env=False)
    return answer.json()["placements"]


def readiness(cluster) -> tuple[bool, int, int]:
    answer = httpx.get(f"{cluster.admin_url}/readyz", timeout=10, trust_env=False).json()
    return answer["ready"], answer["prefill"], answer["decode"]


def test_no_client_sees_the_loss_of_the_only_prefill_worker(pair, asks, eventually):
    with pair.client() as client:
        expected = [client.answer_all([ask])[0].token_ids for ask in asks]
        assert placements(pair)["disaggregated"] > 0
        before = placements(pair)["local"]
        running = [client.start(ask) for ask in asks]
        eventually(
            lambda: pair.state().worker("prefill-0").num_running > 0,
            "the prefill worker reads a prompt",
            timeout_s=30,
        )
        os.kill(pair.pids()["prefill-0"], signal.SIGKILL)
        later = [client.start(ask) for ask in asks]
        ended = [stream.wait(120) for stream in (*running, *later)]
    assert [stream.reason for stream in ended] == ["length"] * len(ended)
    assert [stream.token_ids for stream in ended] == expected * 2
    assert pair.events("retrying"), "a request was in the worker that was killed"
    assert placements(pair)["local"] > before
    eventually(pair.is_at_rest, "the worker is back and no block is held", timeout_s=60)


def test_a_cluster_without_prefill_workers_is_ready_and_answers(start_cluster, asks, eventually):
    cluster = start_cluster("--prefill", "0", settings={"prefill_workers": 0})
    assert set(cluster.pids()) == {"scheduler", "decode-0", "gateway"}
    eventually(lambda: readiness(cluster) == (True, 0, 1), "it is ready", timeout_s=30)
    assert "1 decode worker, reading prompts as well" in cluster.stdout
    assert "Paris" in cluster.ask("What is the capital of France?")
    with cluster.client() as client:
        assert all(stream.reason == "length" for stream in client.answer_all(asks))
    assert placements(cluster) == {"disaggregated": 0, "local": 1 + NUM_STREAMS}
    eventually(cluster.is_at_rest, "no block is held", timeout_s=30)
    cluster.close()
