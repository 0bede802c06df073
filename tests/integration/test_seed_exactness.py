"""The same request gives the same tokens, wherever and however its KV came to be."""

import pytest

from bench.cluster import ALWAYS_HAND_OVER, merged
from bench.streams import generate

pytestmark = pytest.mark.long

ANSWER_TOKENS = 48
AT_ONCE = 12
FLOAT32 = {"dtype": "float32", "block_size": 16, "max_step_tokens": 32, "threads": 1}
# A pool that a dozen answers outgrow: 12 x (prompt + 48 tokens), and room for about half of that.
TIGHT_BLOCKS = 40
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4
WAYS = {
    "disaggregated": merged(ALWAYS_HAND_OVER, {"engine": FLOAT32}),
    "local": {"prefill_workers": 0, "engine": {**FLOAT32, "prefix_cache": False}},
    "preempted": {
        "prefill_workers": 1,
        "scheduler": {"reserve_answer_tokens": 1},
        "engine": {**FLOAT32, "decode_kv_bytes": TIGHT_BLOCKS * BLOCK_BYTES},
    },
    "cached": {"engine": FLOAT32},
}


@pytest.fixture(scope="module")
def asks(encode) -> list:
    """Greedy and sampled, with a common beginning of several blocks."""
    common = encode("A list of things that a gardener should do in every month of the year. " * 3)
    return [
        generate(
            "smollm2-135m-instruct",
            common + encode(f" Month {number}: first of all,"),
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
        )
        for number in range(AT_ONCE)
    ]


@pytest.fixture(scope="module")
def expected(start_cluster, asks) -> list[list[int]]:
    """One at a time, each read by the prefill worker and handed over."""
    cluster = start_cluster(settings=WAYS["disaggregated"])
    with cluster.client() as client:
        answers = [client.answer_all([ask])[0].token_ids for ask in asks]
        together = [stream.token_ids for stream in client.answer_all(asks)]
    cluster.close()
    assert together == answers
    assert all(len(tokens) == ANSWER_TOKENS for tokens in answers)
    return answers


@pytest.mark.parametrize("way", ["local", "preempted", "cached"])
def test_tokens_do_not_depend_on_where_the_prompt_was_read(
    start_cluster, asks, expected, eventually, way
):
    cluster = start_cluster(settings=WAYS[way])
    with cluster.client() as client:
        rounds = [client.answer_all(asks), client.answer_all(asks)]
    counters = cluster.state().worker("decode-0").counters
    eventually(cluster.is_at_rest, "no block is held", timeout_s=30)
    cluster.close()
    for answers in rounds:
        assert [stream.token_ids for stream in answers] == expected
    if way == "local":
        assert counters["local_prefills"] == 2 * AT_ONCE
    if way == "preempted":
        assert counters["preemptions"] > 0
