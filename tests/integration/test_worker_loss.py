"""A process that dies or freezes costs its requests time, and nothing else.

One cluster of two prefill and two decode workers, whose processes are killed and stopped one after
another while it works. Every answer is compared with the one that an undisturbed run gave.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from bench.cluster import ALWAYS_HAND_OVER, merged
from bench.cluster_view import LedgerWatch
from bench.log_events import unix_s
from bench.parity_prompts import PROSE
from bench.streams import TokenStream, generate

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

# Room for an answer of any length is kept from the start, so that a few requests fill a pool.
WHOLE_ANSWER = 10**6
MODEL = "smollm2-135m-instruct"
NUM_STREAMS = 32
ANSWER_TOKENS = 120  # seconds of decoding: what is struck is still at work
BEGUN_TOKENS = 3
LONG_PROMPT_TOKENS = 1000
CHUNK_TOKENS = 64
WHOLE_POOL_TOKENS = 5000  # of 5,824: two such requests never share a decode worker
# What a machine that is busy with other work may add to any of these times.
SHARED_MACHINE_S = 10.0
KILL_SEEN_S = 1.0 + SHARED_MACHINE_S
FREEZE_SEEN_S = 6.0 + SHARED_MACHINE_S
# Four silent seconds end a stream; a writer that does not answer is killed after six.
LEASE_S = 4.0 + SHARED_MACHINE_S
FENCED_S = 10.0 + SHARED_MACHINE_S
BACK_S = 90.0
# Of all 49,152 tokens some always lie so close that rounding orders them one way in one batch and
# the other way in another. Among the likeliest they do not.
SAMPLING: tuple[dict[str, object], ...] = (
    {"top_k": 20},
    {"top_k": 20, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.15},
    {"top_p": 0.9, "top_k": 40},
    {"min_p": 0.05, "repetition_penalty": 1.1},
)


@dataclass(frozen=True)
class Expected:
    """A request and the answer that it must get."""

    request: object
    token_ids: list[int]
    text: str
    reason: str

    def is_answered_by(self, stream: TokenStream) -> bool:
        """Right tokens, text and end, told once. A stop string ends the tokens before the last."""
        count = len(stream.token_ids) if self.reason == "stop_sequence" else len(self.token_ids)
        answer = (stream.token_ids, stream.text, stream.reason, stream.num_terminals)
        return answer == (self.token_ids[:count], self.text, self.reason, 1)


@pytest.fixture(scope="module")
def big(start_cluster) -> Iterator:
    cluster = start_cluster(
        settings=merged(
            ALWAYS_HAND_OVER,
            {
                "prefill_workers": 2,
                "decode_workers": 2,
                "scheduler": {"report_interval_s": 0.1, "reserve_answer_tokens": WHOLE_ANSWER},
                "engine": {
                    "max_step_tokens": CHUNK_TOKENS,
                    "prefill_kv_bytes": 2**28,
                    "decode_kv_bytes": 2**28,
                },
            },
        )
    )
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def short_asks(encode) -> list:
    """Sampled requests with all that must survive a move: seeds, penalties, truncations."""
    return [
        generate(
            MODEL,
            encode(f"Item {number} of the list is"),
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            **{"temperature": 0.8, "seed": number, **SAMPLING[number % len(SAMPLING)]},
        )
        for number in range(NUM_STREAMS)
    ]


@pytest.fixture(scope="module")
def undisturbed(big, short_asks, encode) -> tuple[list[Expected], list[Expected]]:
    """The short and the long requests, answered with nothing in their way.

    Every fourth short one then gets a stop string out of its own answer: what must come instead
    follows from the answer without it.
    """
    prose = encode(PROSE * 12)
    long_asks = [
        generate(MODEL, prose[shift : shift + LONG_PROMPT_TOKENS], max_tokens=4, ignore_eos=True)
        for shift in (0, 1)
    ]
    with big.client() as client:
        answers = client.answer_all([*short_asks, *long_asks])
    assert all(stream.ok and stream.reason == "length" for stream in answers)
    expected = [Expected(each.request, each.token_ids, each.text, "length") for each in answers]
    shorts, longs = expected[:NUM_STREAMS], expected[NUM_STREAMS:]
    shorts[::4] = [_stopped_early(each) for each in shorts[::4]]
    return shorts, longs


def _stopped_early(whole: Expected) -> Expected:
    """The request with a stop string from the second half of its answer."""
    half = len(whole.text) // 2
    stop = next(piece for i in range(half, 0, -1) if (piece := whole.text[i : i + 3]).isascii())
    request = type(whole.request)()
    request.CopyFrom(whole.request)
    request.sampling.stop.append(stop)
    return Expected(request, whole.token_ids, whole.text.partition(stop)[0], "stop_sequence")


def wrong(expected: list[Expected], streams: list[TokenStream]) -> list[str]:
    """What was answered otherwise, for people to read."""
    return [
        f"{number}: {stream.reason} {stream.details!r}, {stream.num_terminals} ends, "
        f"{stream.token_ids} {stream.text!r} instead of {each.token_ids} {each.text!r}"
        for number, (each, stream) in enumerate(zip(expected, streams, strict=True))
        if not each.is_answered_by(stream)
    ]


def strike(cluster, name: str, number: signal.Signals) -> float:
    """Sends the signal to a process of the cluster; gives the Unix time."""
    os.kill(cluster.pids()[name], number)
    return time.time()


def receiver_at_work(
    cluster, client, longs: list[Expected], eventually
) -> tuple[str, int, list[tuple[Expected, TokenStream]]]:
    """A decode worker that a prompt is on its way to, how many answers it decodes, and the prompts.

    Who gets which request is the scheduler's choice, so the prompts are sent until one is seen.
    """
    found: list[tuple[str, int]] = []
    moving: list[tuple[Expected, TokenStream]] = []

    def looked() -> bool:
        if all(stream.code is not None for _, stream in moving):
            moving.extend((each, client.start(each.request)) for each in longs)
        found.extend(
            (worker.name, worker.num_running)
            for worker in cluster.state().workers
            if worker.role == "decode"
            and worker.blocks["in_transfer"] > 0
            and worker.num_running >= 2
        )
        return bool(found)

    eventually(looked, "a prompt is on its way to a worker that decodes", timeout_s=30)
    return *found[0], moving


def retries_since(cluster, unix_time_s: float) -> list[dict]:
    return [event for event in cluster.events("retrying") if unix_s(event) >= unix_time_s]


def survivors_are_free(cluster, lost: str) -> bool:
    """Whether nothing is placed, and every worker but the lost one has all its blocks."""
    state = cluster.state()
    others = [worker for worker in state.workers if worker.name != lost]
    return (
        not state.num_placed
        and len(others) == 3
        and not any(each.num_held_blocks for each in others)
    )


@pytest.mark.parametrize(
    ("number", "detected_within_s"),
    [(signal.SIGKILL, KILL_SEEN_S), (signal.SIGSTOP, FREEZE_SEEN_S)],
)
def test_a_lost_decode_worker_costs_no_stream_and_no_token(
    big, undisturbed, eventually, number, detected_within_s
):
    """32 streams decode, and a long prompt is on its way to the worker that is struck."""
    shorts, longs = undisturbed
    eventually(big.is_at_rest, "all workers are there and at rest", timeout_s=BACK_S)
    with big.client() as client, LedgerWatch(big.admin_url) as watch:
        streams = [client.start(each.request) for each in shorts]
        eventually(
            lambda: all(len(stream.token_ids) >= BEGUN_TOKENS for stream in streams),
            "every stream has begun",
            timeout_s=60,
        )
        victim, num_decoding, moving = receiver_at_work(big, client, longs, eventually)
        struck_s = strike(big, victim, number)
        assert wrong(shorts, [stream.wait(120) for stream in streams]) == []
        asked = [each for each, _ in moving]
        assert wrong(asked, [stream.wait(120) for _, stream in moving]) == []
        eventually(
            lambda: survivors_are_free(big, victim),
            "the survivors have every block back",
            timeout_s=FENCED_S + LEASE_S,
        )
    retries = retries_since(big, struck_s)
    assert len(retries) > num_decoding // 2, "what it decoded has moved, or ended just before"
    begun = [event["tokens_sent"] >= BEGUN_TOKENS for event in retries]
    assert not all(begun), "one was being handed over, or had just been"
    assert any(begun), "others had begun to answer"
    assert max(unix_s(event) for event in retries) - struck_s <= detected_within_s
    assert watch.unbalanced == []
    assert watch.num_looks > 0
    if number is signal.SIGSTOP:
        frozen = [event["child"] for event in big.events("frozen; it is killed")]
        assert frozen == [victim]


def test_a_decode_worker_that_is_asked_to_stop_hands_its_streams_over_and_ends(
    big, undisturbed, eventually
):
    shorts, _ = undisturbed
    eventually(big.is_at_rest, "all workers are there and at rest", timeout_s=BACK_S)
    ends = len(big.events("ended unexpectedly; it will be restarted"))
    with big.client() as client, LedgerWatch(big.admin_url) as watch:
        streams = [client.start(each.request) for each in shorts]
        eventually(
            lambda: all(len(stream.token_ids) >= 2 for stream in streams),
            "every stream has begun",
            timeout_s=60,
        )
        pid = big.pids()["decode-0"]
        asked_s = strike(big, "decode-0", signal.SIGTERM)
        assert wrong(shorts, [stream.wait(120) for stream in streams]) == []
    assert retries_since(big, asked_s) == []
    assert watch.unbalanced == []
    eventually(lambda: big.has_replaced("decode-0", pid), "it is back", timeout_s=BACK_S)
    (end,) = big.events("ended unexpectedly; it will be restarted")[ends:]
    assert (end["child"], end["ended_by"]) == ("decode-0", "exit code 0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_prefill_worker_costs_no_request_and_no_block(big, undisturbed, eventually, number):
    """Struck amid a long prompt: the receiver keeps its blocks back until the writer is dead."""
    _, longs = undisturbed
    eventually(big.is_at_rest, "all workers are there and at rest", timeout_s=BACK_S)
    with big.client() as client, LedgerWatch(big.admin_url) as watch:
        streams = [client.start(each.request) for each in longs]
        eventually(
            lambda: big.state().worker("prefill-0").num_running > 0,
            "prefill-0 has sent its first chunk",
            timeout_s=30,
        )
        struck_s = strike(big, "prefill-0", number)
        if number is signal.SIGSTOP:
            eventually(
                lambda: big.state().blocks("quarantined", "decode") > 0,
                "what it may still write into is kept back",
                timeout_s=FREEZE_SEEN_S,
            )
        eventually(
            lambda: (
                retries_since(big, struck_s) and not big.state().blocks("quarantined", "decode")
            ),
            "the writer is dead, and its blocks are free",
            timeout_s=struck_s + FENCED_S - time.time(),
        )
        assert wrong(longs, [stream.wait(120) for stream in streams]) == []
        eventually(
            lambda: survivors_are_free(big, "prefill-0"),
            "the survivors have every block back",
            timeout_s=LEASE_S,
        )
    assert len(retries_since(big, struck_s)) == 1
    assert watch.unbalanced == []


def test_a_lost_gateway_leaves_no_block_behind(big, undisturbed, eventually):
    shorts, longs = undisturbed
    eventually(big.is_at_rest, "all workers are there and at rest", timeout_s=BACK_S)
    gateway = big.pids()["gateway"]
    with big.client() as client, LedgerWatch(big.admin_url) as watch:
        streams = [client.start(each.request) for each in shorts[1:8]]
        eventually(
            lambda: all(len(stream.token_ids) >= 2 for stream in streams),
            "every stream has begun",
            timeout_s=60,
        )
        streams += [client.start(each.request) for each in longs]
        eventually(
            lambda: big.state().blocks("in_transfer", "decode") > 0,
            "prompts are on their way",
            timeout_s=30,
        )
        strike(big, "gateway", signal.SIGKILL)
        codes = [stream.wait(30).code for stream in streams]
        eventually(big.is_at_rest, "every block is back", timeout_s=FENCED_S)
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
    assert watch.unbalanced == []
    eventually(lambda: big.has_replaced("gateway", gateway), "a gateway is back", timeout_s=30)
    with big.client() as client:
        again = client.start(shorts[1].request).wait(60)
    assert wrong(shorts[1:2], [again]) == []


def test_a_lost_scheduler_stops_no_stream_and_forgets_no_queued_request(
    big, undisturbed, eventually
):
    shorts, _ = undisturbed
    eventually(big.is_at_rest, "all workers are there and at rest", timeout_s=BACK_S)
    whole_pool = [shorts[number].request.__class__() for number in (1, 2, 3)]
    for request, number in zip(whole_pool, (1, 2, 3), strict=True):
        request.CopyFrom(shorts[number].request)
        request.sampling.max_tokens = WHOLE_POOL_TOKENS
    scheduler = big.pids()["scheduler"]
    with big.client() as client:
        running = [client.start(request) for request in whole_pool[:2]]
        eventually(lambda: all(stream.token_ids for stream in running), "both run", timeout_s=60)
        head = client.start(whole_pool[2])
        eventually(lambda: big.state().num_queued == 1, "the third waits", timeout_s=30)
        behind = [client.start(each.request) for each in shorts[5:8]]
        eventually(lambda: big.state().num_queued == 4, "the others wait", timeout_s=30)
        struck_s = strike(big, "scheduler", signal.SIGKILL)
        heard = [len(stream.token_ids) for stream in running]
        eventually(
            lambda: big.has_replaced("scheduler", scheduler), "a scheduler is back", timeout_s=30
        )
        eventually(
            lambda: (big.state().num_queued, big.state().num_placed) == (4, 2),
            "it knows what waits and what runs",
            timeout_s=30,
        )
        eventually(
            lambda: all(
                len(stream.token_ids) > count + 2
                for stream, count in zip(running, heard, strict=True)
            ),
            "the streams went on",
            timeout_s=30,
        )
        for stream in running:
            stream.cancel()
        eventually(lambda: len(head.token_ids) > 0, "the third was placed", timeout_s=60)
        head.cancel()
        assert wrong(shorts[5:8], [stream.wait(60) for stream in behind]) == []
    for stream, number in zip([*running, head], (1, 2, 3), strict=True):
        count = min(len(stream.token_ids), ANSWER_TOKENS)
        assert stream.token_ids[:count] == shorts[number].token_ids[:count]
    assert retries_since(big, struck_s) == []
    eventually(big.is_at_rest, "nothing has leaked", timeout_s=LEASE_S + 1)
