"""Every way to stop, at every stage: each ends right, once, and leaves both ledgers as they were.

One cluster of one worker of each kind, which retries nothing, so that an error is an error. Its
sender stalls before each block, so that a transfer lasts; its chunks are small, so that a prefill
does; a process that is stopped with SIGSTOP is not killed, so that a stage can be held.

A request is RESERVED while its decode worker holds blocks for it and the prefill worker has not
answered; PREFILLING while a prompt computes, TRANSFERRING from then until the decode worker takes
over, ADOPTED from the first token to the second, DECODING after that.
"""

import contextlib
import enum
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import httpx
import pytest

from bench.cluster import ALWAYS_HAND_OVER, merged
from bench.parity_prompts import PROSE
from bench.streams import StreamClient, TokenStream, generate

pytestmark = pytest.mark.timeout(120)

# Room for an answer of any length is kept from the start, so that a few requests fill a pool.
WHOLE_ANSWER = 10**6
MODEL = "smollm2-135m-instruct"
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."
CHUNK_TOKENS = 32
BLOCK_TOKENS = 16
POOL_BLOCKS = 182
STALL_S = 0.5
DEADLINE_S = 2.0  # of a request by HTTP, which brings none of its own
ACCEPT_S = 2.5
LEASE_S = 3.0
# The promise is the lease and one second; a machine that has other work gets some more.
AT_REST_S = LEASE_S + 1 + 10


class Stage(enum.Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    ADOPTED = "adopted"
    DECODING = "decoding"


class HttpStream:
    """A streamed completion by HTTP: what was told of its end."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        self.reason = ""
        self.num_terminals = 0
        self.has_begun = threading.Event()
        self.began_s = time.monotonic()
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        self._thread = threading.Thread(target=self._run, args=(url, body))
        self._thread.start()

    def wait(self) -> "HttpStream":
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        return self

    def _run(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", url, json=body, timeout=30, trust_env=False) as response:
            if response.status_code != 200:
                self._end(json.loads(response.read())["error"]["code"])
                return
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self._end("done")
                elif line.startswith("data: "):
                    event = json.loads(data)
                    if "error" in event:
                        self._end(event["error"]["code"])
                    elif event["choices"] and event["choices"][0]["text"]:
                        self.has_begun.set()

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.num_terminals += 1


class Lab:
    """The cluster, and the ways to bring a request to a stage and to stop it there."""

    def __init__(self, cluster, client: StreamClient, encode, eventually) -> None:
        self.cluster = cluster
        self.client = client
        self.until = eventually
        self.question = encode(QUESTION)
        self.long_text = PROSE * 30
        prose = encode(self.long_text)
        self.thousands = prose[:2400]
        self.several_chunks = prose[:160]
        self.sixty = prose[:60]
        answer = self.start(self.question, max_tokens=16).wait(60)
        assert (answer.text, answer.reason) == (ANSWER, "eos")
        self.answer = answer.token_ids
        # Two turns: the answer comes after more than one chunk.
        turn = [*self.question, *self.answer]
        self.second_question = [*turn, *encode("\n"), *self.question]

    def start(self, prompt: list[int], **sampling: object) -> TokenStream:
        return self.client.start(generate(MODEL, prompt, **sampling))

    def start_by_http(self, prompt: str, max_tokens: int) -> HttpStream:
        return HttpStream(f"{self.cluster.http_url}/v1/completions", prompt, max_tokens)

    def stage(self) -> Stage | None:
        """The stage of the one request that is not decoding."""
        state = self.cluster.state()
        prefill, decode = state.worker("prefill-0"), state.worker("decode-0")
        if state.num_queued:
            return Stage.QUEUED
        if prefill.num_running:
            return Stage.PREFILLING
        if prefill.blocks["owned"]:
            return Stage.TRANSFERRING
        return Stage.RESERVED if decode.blocks["in_transfer"] else None

    def reach(self, stage: Stage) -> None:
        self.until(lambda: self.stage() is stage, f"it is {stage.value}", timeout_s=30)

    def begins(self, stream: TokenStream, num_tokens: int = 1) -> None:
        deadline_s = time.monotonic() + 20
        while len(stream.token_ids) < num_tokens:  # not by `until`: its looks are too far apart
            assert stream.code is None, stream.details
            assert time.monotonic() < deadline_s
            time.sleep(0.002)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """The process stands still inside the block."""
        pid = self.cluster.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Inside the block a request decodes that leaves room for no other."""
        filler = self.start(
            self.question, max_tokens=(POOL_BLOCKS - 4) * BLOCK_TOKENS, ignore_eos=True
        )
        try:
            self.begins(filler)
            yield
        finally:
            filler.cancel()

    # --- both at once: five seconds of silence are paid once ----------------------------------

    @functools.cached_property
    def lost_prefill_worker(self) -> tuple[TokenStream, ...]:
        """A request that is transferring and one that prefills, when their worker freezes."""
        first = self.start(self.sixty, max_tokens=100, ignore_eos=True)
        second = self.start(self.thousands, max_tokens=100, ignore_eos=True)
        held = -(-len(self.sixty) // BLOCK_TOKENS) + len(self.thousands) // BLOCK_TOKENS

        def both() -> bool:
            prefill = self.cluster.state().worker("prefill-0")
            return prefill.num_running == 1 and prefill.blocks["owned"] == held

        self.until(both, "one is transferring, the other prefills", timeout_s=30)
        with self.stopped("prefill-0"):
            assert first.code is None and not first.token_ids
            return self.both_are_lost(first, second)

    @functools.cached_property
    def lost_decode_worker(self) -> tuple[TokenStream, ...]:
        """A request that just got its first token and one that decodes, when theirs freezes."""
        decoding = self.start(self.question, max_tokens=500, ignore_eos=True)
        self.begins(decoding, 5)
        adopted = self.start(self.question[:-1], max_tokens=500, ignore_eos=True)
        self.begins(adopted)
        with self.stopped("decode-0"):
            return self.both_are_lost(adopted, decoding)

    def both_are_lost(self, *streams: TokenStream) -> tuple[TokenStream, ...]:
        failures = len(self.cluster.events("request_failed"))
        for stream in streams:
            stream.wait(30)
        logged = self.cluster.events("request_failed")[failures:]
        assert [event["code"] for event in logged] == ["worker_lost"] * len(streams)
        return streams


@dataclass(frozen=True)
class Ends:
    """A cell that can happen: how to make it, and what is told of it."""

    make: Callable[[Lab], TokenStream | HttpStream]
    reason: str
    text: str | None = None
    logged: str | None = None  # the code of the one failure that the gateway logs, if it does
    shared: bool = False  # made together with another cell, which may have run before


@dataclass(frozen=True)
class Never:
    """A cell that cannot happen."""

    why: str


# --- ends by a token --------------------------------------------------------------------------


def first_token_is_eos(lab: Lab) -> TokenStream:
    return lab.start([*lab.question, *lab.answer[:-1]], max_tokens=9).wait(20)


def first_token_is_eos_after_chunks(lab: Lab) -> TokenStream:
    stream = lab.start([*lab.second_question, *lab.answer[:-1]], max_tokens=9)
    lab.reach(Stage.TRANSFERRING)
    return stream.wait(20)


def first_token_is_a_stop_token(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=9, stop_token_ids=lab.answer[:1]).wait(20)


def first_token_is_a_stop_token_after_chunks(lab: Lab) -> TokenStream:
    stream = lab.start(lab.second_question, max_tokens=9, stop_token_ids=lab.answer[:1])
    lab.reach(Stage.TRANSFERRING)
    return stream.wait(20)


def one_token(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=1).wait(20)


def one_token_after_chunks(lab: Lab) -> TokenStream:
    stream = lab.start(lab.second_question, max_tokens=1)
    lab.reach(Stage.TRANSFERRING)
    return stream.wait(20)


def second_token_is_eos(lab: Lab) -> TokenStream:
    return lab.start([*lab.question, *lab.answer[:-2]], max_tokens=9).wait(20)


def stop_string_in_the_first_token(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=200, ignore_eos=True, stop=["The"]).wait(20)


def two_tokens(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=2).wait(20)


def whole_answer(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=200).wait(20)


def stop_string_over_two_tokens(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=200, stop=["France is"]).wait(20)


def five_tokens(lab: Lab) -> TokenStream:
    return lab.start(lab.question, max_tokens=5).wait(20)


# --- the client leaves ------------------------------------------------------------------------


def leave_while_queued(lab: Lab) -> TokenStream:
    with lab.full():
        stream = lab.start(lab.question, max_tokens=200)
        lab.reach(Stage.QUEUED)
        stream.cancel()
        lab.until(
            lambda: (lab.cluster.state().num_queued, lab.cluster.state().num_placed) == (0, 1),
            "it has left the queue",
            timeout_s=30,
        )
    return stream.wait(30)


def leave_while_reserved(lab: Lab) -> TokenStream:
    with lab.stopped("prefill-0"):
        stream = lab.start(lab.question, max_tokens=200)
        lab.reach(Stage.RESERVED)
        stream.cancel()
        lab.until(
            lambda: lab.cluster.state().blocks("quarantined", "decode") > 0,
            "its blocks wait for the prefill worker's word",
            timeout_s=30,
        )
    return stream.wait(30)


def leave_at(stage: Stage, stream: TokenStream, lab: Lab) -> TokenStream:
    lab.reach(stage)
    stream.cancel()
    return stream.wait(30)


def leave_while_prefilling(lab: Lab) -> TokenStream:
    return leave_at(Stage.PREFILLING, lab.start(lab.thousands, max_tokens=200), lab)


def leave_while_transferring(lab: Lab) -> TokenStream:
    return leave_at(Stage.TRANSFERRING, lab.start(lab.several_chunks, max_tokens=200), lab)


def leave_after(num_tokens: int, lab: Lab) -> TokenStream:
    stream = lab.start(lab.question, max_tokens=500, ignore_eos=True)
    lab.begins(stream, num_tokens)
    stream.cancel()
    return stream.wait(30)


# --- the deadline passes ----------------------------------------------------------------------


def time_out_while_queued(lab: Lab) -> HttpStream:
    with lab.full():
        stream = lab.start_by_http(QUESTION, 200)
        lab.reach(Stage.QUEUED)
        return stream.wait()


def time_out_while_reserved(lab: Lab) -> HttpStream:
    with lab.stopped("prefill-0"):
        stream = lab.start_by_http(QUESTION, 200)
        lab.reach(Stage.RESERVED)
        return stream.wait()


def time_out_while_prefilling(lab: Lab) -> HttpStream:
    stream = lab.start_by_http(lab.long_text[:9000], 16)
    lab.reach(Stage.PREFILLING)
    return stream.wait()


def time_out_while_transferring(lab: Lab) -> HttpStream:
    stream = lab.start_by_http(lab.long_text[:700], 200)
    lab.reach(Stage.TRANSFERRING)
    return stream.wait()


def time_out_when_adopted(lab: Lab) -> HttpStream:
    """The decode worker stands still from the first token to the deadline."""
    stream = lab.start_by_http(QUESTION, 500)
    assert stream.has_begun.wait(DEADLINE_S)
    with lab.stopped("decode-0"):
        over_s = stream.began_s + DEADLINE_S
        lab.until(lambda: time.monotonic() > over_s, "the deadline passed", timeout_s=DEADLINE_S)
    return stream.wait()


def time_out_while_decoding(lab: Lab) -> HttpStream:
    return lab.start_by_http(QUESTION, 2000).wait()


# --- something fails --------------------------------------------------------------------------


def fail_while_queued(lab: Lab) -> TokenStream:
    """Larger than any pool, which its turn in the queue shows."""
    with lab.full():
        first = lab.start(lab.question, max_tokens=200)
        lab.reach(Stage.QUEUED)
        stream = lab.start(lab.question, max_tokens=POOL_BLOCKS * BLOCK_TOKENS)
        lab.until(lambda: lab.cluster.state().num_queued == 2, "both wait", timeout_s=30)
    assert first.wait(20).reason == "eos"
    return stream.wait(30)


def fail_while_reserved(lab: Lab) -> TokenStream:
    """The prefill worker does not answer."""
    with lab.stopped("prefill-0"):
        stream = lab.start(lab.question, max_tokens=200)
        lab.reach(Stage.RESERVED)
        return stream.wait(30)


NO_TOKEN = Never("no token is sampled before a prompt is computed")
LEFT = "cancelled"
LATE = "deadline_exceeded"

TABLE: dict[tuple[Stage, str], Ends | Never] = {
    (Stage.QUEUED, "eos"): NO_TOKEN,
    (Stage.QUEUED, "stop_sequence"): NO_TOKEN,
    (Stage.QUEUED, "length"): NO_TOKEN,
    (Stage.QUEUED, "cancelled"): Ends(leave_while_queued, LEFT),
    (Stage.QUEUED, "timeout"): Ends(time_out_while_queued, LATE, logged=LATE),
    (Stage.QUEUED, "error"): Ends(
        fail_while_queued, "invalid_argument", logged="context_length_exceeded"
    ),
    (Stage.RESERVED, "eos"): NO_TOKEN,
    (Stage.RESERVED, "stop_sequence"): NO_TOKEN,
    (Stage.RESERVED, "length"): NO_TOKEN,
    (Stage.RESERVED, "cancelled"): Ends(leave_while_reserved, LEFT),
    (Stage.RESERVED, "timeout"): Ends(time_out_while_reserved, LATE, logged=LATE),
    (Stage.RESERVED, "error"): Ends(fail_while_reserved, "unavailable", logged="worker_lost"),
    # A prompt of one chunk, whose first token ends the request: no block ever leaves.
    (Stage.PREFILLING, "eos"): Ends(first_token_is_eos, "eos", ""),
    (Stage.PREFILLING, "stop_sequence"): Ends(first_token_is_a_stop_token, "stop_sequence", ""),
    (Stage.PREFILLING, "length"): Ends(one_token, "length", "The"),
    (Stage.PREFILLING, "cancelled"): Ends(leave_while_prefilling, LEFT),
    (Stage.PREFILLING, "timeout"): Ends(time_out_while_prefilling, LATE, logged=LATE),
    (Stage.PREFILLING, "error"): Ends(
        lambda lab: lab.lost_prefill_worker[1], "unavailable", shared=True
    ),
    # A longer prompt: its first chunk is on its way when the first token ends the request.
    (Stage.TRANSFERRING, "eos"): Ends(first_token_is_eos_after_chunks, "eos", ""),
    (Stage.TRANSFERRING, "stop_sequence"): Ends(
        first_token_is_a_stop_token_after_chunks, "stop_sequence", ""
    ),
    (Stage.TRANSFERRING, "length"): Ends(one_token_after_chunks, "length", "The"),
    (Stage.TRANSFERRING, "cancelled"): Ends(leave_while_transferring, LEFT),
    (Stage.TRANSFERRING, "timeout"): Ends(time_out_while_transferring, LATE, logged=LATE),
    (Stage.TRANSFERRING, "error"): Ends(
        lambda lab: lab.lost_prefill_worker[0], "unavailable", shared=True
    ),
    (Stage.ADOPTED, "eos"): Ends(second_token_is_eos, "eos", "."),
    (Stage.ADOPTED, "stop_sequence"): Ends(stop_string_in_the_first_token, "stop_sequence", ""),
    (Stage.ADOPTED, "length"): Ends(two_tokens, "length", "The capital"),
    (Stage.ADOPTED, "cancelled"): Ends(functools.partial(leave_after, 1), LEFT),
    (Stage.ADOPTED, "timeout"): Ends(time_out_when_adopted, LATE, logged=LATE),
    (Stage.ADOPTED, "error"): Ends(
        lambda lab: lab.lost_decode_worker[0], "unavailable", shared=True
    ),
    (Stage.DECODING, "eos"): Ends(whole_answer, "eos", ANSWER),
    (Stage.DECODING, "stop_sequence"): Ends(
        stop_string_over_two_tokens, "stop_sequence", "The capital of "
    ),
    (Stage.DECODING, "length"): Ends(five_tokens, "length", "The capital of France is"),
    (Stage.DECODING, "cancelled"): Ends(functools.partial(leave_after, 5), LEFT),
    (Stage.DECODING, "timeout"): Ends(time_out_while_decoding, LATE, logged=LATE),
    (Stage.DECODING, "error"): Ends(
        lambda lab: lab.lost_decode_worker[1], "unavailable", shared=True
    ),
}


@pytest.fixture(scope="module")
def lab(start_cluster, encode, eventually) -> Iterator[Lab]:
    cluster = start_cluster(
        settings=merged(
            ALWAYS_HAND_OVER,
            {
                "frozen_after_s": 600.0,
                "gateway": {
                    "default_timeout_s": DEADLINE_S,
                    "retry_budget_ratio": 0.0,
                    "retry_budget_floor": 0,
                },
                "scheduler": {"report_interval_s": 0.1, "reserve_answer_tokens": WHOLE_ANSWER},
                "engine": {
                    "max_step_tokens": CHUNK_TOKENS,
                    "block_size": BLOCK_TOKENS,
                    "prefill_kv_bytes": 2**27,
                    "decode_kv_bytes": 2**27,
                },
                "transfer": {
                    "transport": "shm",
                    "push": "blocks",
                    "accept_timeout_s": ACCEPT_S,
                    "adopt_timeout_s": LEASE_S,
                    "faults": f"stall=1,stall_s={STALL_S}",
                },
            },
        )
    )
    assert cluster.state().worker("decode-0").num_blocks == POOL_BLOCKS
    with cluster.client() as client:
        yield Lab(cluster, client, encode, eventually)
    assert cluster.is_at_rest(), "a report may come late, but a leak stays"
    cluster.close()


def test_the_table_has_every_cell():
    outcomes = ("eos", "stop_sequence", "length", "cancelled", "timeout", "error")
    assert set(TABLE) == {(stage, outcome) for stage in Stage for outcome in outcomes}


@pytest.mark.parametrize(
    ("stage", "outcome"),
    [cell for cell, entry in TABLE.items() if isinstance(entry, Ends)],
    ids=lambda value: value.value if isinstance(value, Stage) else value,
)
def test_a_request_ends_right_and_once_and_leaves_no_block_behind(lab, stage, outcome):
    cell = TABLE[stage, outcome]
    assert isinstance(cell, Ends)
    failures = len(lab.cluster.events("request_failed"))
    stream = cell.make(lab)
    assert (stream.reason, stream.num_terminals) == (cell.reason, 1)
    if cell.text is not None:
        assert stream.text == cell.text
        assert stream.code is grpc.StatusCode.OK
    lab.until(
        lab.cluster.is_at_rest, "nothing is placed and all blocks are free", timeout_s=AT_REST_S
    )
    logged = lab.cluster.events("request_failed")[failures:]
    if not cell.shared:
        assert [event["code"] for event in logged] == [cell.logged] * (cell.logged is not None)
