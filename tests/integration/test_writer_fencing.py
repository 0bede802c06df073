"""A writer that stops just before its copy and goes on later changes nobody's KV.

Two prefill workers, and a decode worker with room for two requests. The first prefill worker's
sender stops its own process just before the first block that it writes on any connection; the
second's never does. What must not happen then is told by the pool itself, which this test reads.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import structlog

from bench.cluster import ALWAYS_HAND_OVER, merged
from bench.cluster_view import LedgerWatch
from bench.log_events import unix_s
from bench.parity_prompts import PROSE
from bench.streams import TokenStream, generate
from core.messages import TransferId
from kv_transfer import faulty
from kv_transfer.liveness import shared_folder
from kv_transfer.shm import Segment

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

MODEL = "smollm2-135m-instruct"
BLOCK_BYTES = 30 * 2 * 16 * 3 * 64 * 4  # layers, K and V, tokens, heads, head size, float32
PROMPT_TOKENS = 60
ANSWER_TOKENS = 30
PROMPT_BLOCKS = 4  # of the prompt and one token: what a request holds at first
REQUEST_BLOCKS = 6
POOL_BLOCKS = 2 * REQUEST_BLOCKS
FREEZE = 0.01
MAX_TRIES = 20
# What a machine that is busy with other work may add to any of these times.
SHARED_MACHINE_S = 10.0
SILENT_S = 6.0 + SHARED_MACHINE_S  # a frozen peer is noticed within this time
FENCED_S = 10.0 + SHARED_MACHINE_S
BACK_S = 90.0


class _Nowhere:
    name = "nowhere"

    def write(self, *piece: object) -> None:
        pass

    def flush(self, *, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def _freezes(seed: int, stream: str, num_writes: int) -> list[int]:
    """Which of a connection's writes would freeze its process."""
    sender = faulty.FaultySender(_Nowhere(), f"seed={seed},freeze={FREEZE}", stream=stream)
    found = []
    for number in range(num_writes):
        before = sender.injected["freeze"]
        sender.write(TransferId(request_id="r", attempt=1), 0, 0, 0, np.zeros(1, np.uint8))
        if sender.injected["freeze"] > before:
            found.append(number)
    return found


@pytest.fixture(scope="module")
def seed() -> int:
    """A seed by which prefill-0 freezes at a connection's first write, and prefill-1 never."""
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs():
        patch.setattr(faulty.signal, "pthread_kill", lambda thread, number: None)
        return next(
            seed
            for seed in range(10**5)
            if _freezes(seed, "prefill-0/decode-0", 1) == [0]
            and _freezes(seed, "prefill-0/decode-0", 20) == [0]
            and _freezes(seed, "prefill-1/decode-0", 80) == []
        )


@pytest.fixture(scope="module")
def prompts(encode) -> list[list[int]]:
    prose = encode(PROSE * 3)
    return [prose[shift : shift + PROMPT_TOKENS] for shift in range(0, 60, 10)]


def ask(prompt: list[int]):
    return generate(MODEL, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed(cluster, prompts) -> list[list[int]]:
    """The answers of a cluster in which nothing freezes."""
    with cluster.client() as client:
        answers = client.answer_all([ask(prompt) for prompt in prompts])
    assert all(len(stream.token_ids) == ANSWER_TOKENS for stream in answers)
    return [stream.token_ids for stream in answers]


@pytest.fixture(scope="module")
def narrow(start_cluster, seed) -> Iterator:
    cluster = start_cluster(
        settings=merged(
            ALWAYS_HAND_OVER,
            {
                "prefill_workers": 2,
                "scheduler": {"report_interval_s": 0.1},
                "engine": {
                    "decode_kv_bytes": POOL_BLOCKS * BLOCK_BYTES,
                    "prefill_kv_bytes": 2**27,
                    "prefix_cache": False,  # the test wipes blocks that no request holds
                },
                "transfer": {
                    "transport": "shm",
                    "push": "blocks",
                    "faults": f"seed={seed},freeze={FREEZE}",
                },
            },
        )
    )
    assert cluster.state().worker("decode-0").num_blocks == POOL_BLOCKS
    yield cluster
    cluster.close()


def freezes(cluster) -> list[dict]:
    return [event for event in cluster.events("fault_injected") if event["kind"] == "freeze"]


def stop_a_writer(
    cluster, client, prompts, eventually, wipe: Callable[[], None] = lambda: None
) -> TokenStream:
    """Asks `prompts[0]` until the writer that stops is the one that is to write it.

    `wipe` is called before each request, when no other one holds a block.

    The scheduler takes whichever it finds faster. Every second time that one is given a prompt to
    read first, whose one token ends it before a block leaves.
    """
    before = len(freezes(cluster))

    def frozen() -> bool:
        return len(freezes(cluster)) > before

    for number in range(MAX_TRIES):
        eventually(cluster.is_at_rest, "the one before has left", timeout_s=30)
        wipe()
        if number % 2:
            first = client.start(generate(MODEL, prompts[1] + prompts[1][:20], max_tokens=1))
        stream = client.start(ask(prompts[0]))
        eventually(
            lambda stream=stream: frozen() or stream.code is not None,
            "its writer has stopped, or it is answered",
            timeout_s=30,
        )
        if number % 2:
            first.wait(30)
        if frozen():
            return stream
    pytest.fail(f"{MAX_TRIES} requests, and none went to the writer that stops")


def untouched(pool: np.ndarray) -> set[int]:
    """The blocks that nobody has written to since the pool was wiped."""
    return {block for block in range(len(pool)) if not pool[block].any()}


def test_what_a_stopped_writer_may_still_write_into_is_lent_to_nobody(
    narrow, prompts, undisturbed, eventually
):
    def quarantined() -> int:
        return narrow.state().blocks("quarantined", "decode")

    (name,) = [each for each in narrow.segments() if each.endswith(".kv")]
    segment = Segment.attach(shared_folder() / name)

    def wipe() -> None:
        segment.bytes[:] = 0

    # The supervisor would kill the frozen writer. It stands still too, so that the writer lives on.
    narrow.process.send_signal(signal.SIGSTOP)
    try:
        with narrow.client() as client, LedgerWatch(narrow.admin_url) as watch:
            moved = stop_a_writer(narrow, client, prompts, eventually, wipe)
            eventually(
                lambda: quarantined() == PROMPT_BLOCKS,
                "its blocks are kept back",
                timeout_s=SILENT_S,
            )
            assert moved.wait(60).token_ids == undisturbed[0], "it moved to the other writer"

            wanting = [client.start(ask(prompt)) for prompt in prompts[1:4]]
            eventually(
                lambda: narrow.state().num_queued > 0,
                "the blocks are wanted, and others wait for those that are left",
                timeout_s=30,
            )
            answers = [stream.wait(60).token_ids for stream in wanting]
            assert answers == undisturbed[1:4]
            assert quarantined() == PROMPT_BLOCKS
            fresh = untouched(segment.bytes)
            assert len(fresh) >= PROMPT_BLOCKS, "what is kept back was given to no one"

            neighbour = client.start(ask(prompts[4]))
            eventually(lambda: len(neighbour.token_ids) >= 2, "a neighbour decodes", timeout_s=30)
            fresh &= untouched(segment.bytes)
            os.kill(narrow.pids()["prefill-0"], signal.SIGCONT)
            eventually(
                lambda: not fresh <= untouched(segment.bytes), "the late write lands", timeout_s=30
            )
            assert neighbour.code is None, "while the neighbour decodes"
            eventually(lambda: quarantined() == 0, "the writer's word frees them", timeout_s=30)
            assert neighbour.wait(60).token_ids == undisturbed[4]
        assert watch.unbalanced == []
    finally:
        segment.close()
        narrow.process.send_signal(signal.SIGCONT)
    eventually(narrow.is_at_rest, "every block is free", timeout_s=SILENT_S)


def test_a_stopped_writer_is_killed_and_its_blocks_come_back(
    narrow, prompts, undisturbed, eventually
):
    """The client leaves meanwhile: no request waits for the blocks, and still nobody gets them."""
    eventually(narrow.is_at_rest, "all workers are there and at rest", timeout_s=BACK_S)
    with narrow.client() as client, LedgerWatch(narrow.admin_url) as watch:
        leaving = stop_a_writer(narrow, client, prompts, eventually)
        stopped_s = unix_s(freezes(narrow)[-1])
        leaving.cancel()
        eventually(
            lambda: narrow.state().blocks("quarantined", "decode") == PROMPT_BLOCKS,
            "its blocks are kept back",
            timeout_s=SILENT_S,
        )
        eventually(
            lambda: narrow.state().blocks("quarantined", "decode") == 0,
            "the writer is dead, and they are free",
            timeout_s=stopped_s + FENCED_S - time.time(),
        )
        assert len(narrow.events("frozen; it is killed")) == 1
        assert client.start(ask(prompts[5])).wait(60).token_ids == undisturbed[5]
    assert watch.unbalanced == []
    assert watch.max_quarantined == PROMPT_BLOCKS
