"""One request's spans, from four processes, under one trace, as a real collector gets them.

What arrived is asserted on: a client of a collector reports success whatever became of its spans.
"""

import secrets
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from bench.cluster import ALWAYS_HAND_OVER, merged
from bench.otlp_receiver import OtlpReceiver, ReceivedSpan
from bench.parity_prompts import PROSE
from bench.streams import StreamClient, generate

MODEL = "smollm2-135m-instruct"
SERVER = f"chat {MODEL}"
LONG_PROMPT_TOKENS = 1500
CHUNK_TOKENS = 64
GATEWAY, SCHEDULER = "tandem-gateway", "tandem-scheduler"
PREFILL, DECODE = "tandem-prefill-worker", "tandem-decode-worker"
# Every stage of a request that is handed over: who does it, and what it hangs under.
HANDED_OVER = {
    SERVER: (GATEWAY, None),
    "validate": (GATEWAY, SERVER),
    "render": (GATEWAY, SERVER),
    "tokenise": (GATEWAY, SERVER),
    "attempt": (GATEWAY, SERVER),
    "flush": (GATEWAY, SERVER),
    "queue": (SCHEDULER, "attempt"),
    "reserve": (DECODE, "attempt"),
    "kv_receive": (DECODE, "attempt"),
    "prefill": (PREFILL, "kv_receive"),
    "kv_transfer": (PREFILL, "kv_receive"),
    "adopt": (DECODE, "attempt"),
    "decode": (DECODE, "attempt"),
}
LOCAL = {
    name: stage
    for name, stage in HANDED_OVER.items()
    if name not in ("kv_receive", "kv_transfer", "adopt")
} | {"prefill": (DECODE, "attempt")}


class Caller:
    """A span of a client's, which the request is made in."""

    def __init__(self, *, sampled=True):
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-0{int(sampled)}"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as made:
        yield made


@pytest.fixture(scope="module")
def traced(start_cluster, receiver):
    """Starts a cluster that tells the receiver."""

    def start(settings):
        told = {"telemetry": {"otlp_endpoint": receiver.endpoint}}
        return start_cluster(settings=merged(settings, told))

    return start


@pytest.fixture(scope="module")
def handing_over(traced):
    """Gives every prompt away, in small chunks."""
    chunks = {"engine": {"max_step_tokens": CHUNK_TOKENS, "itl_target_s": 0.0}}
    quick = {"scheduler": {"report_interval_s": 0.05}}
    return traced(merged(merged(ALWAYS_HAND_OVER, chunks), quick))


@pytest.fixture(scope="module")
def damaging(traced):
    """Spoils every KV block that is sent, and samples nothing."""
    faults = {"transfer": {"faults": "seed=1,corrupt=1.0"}, "telemetry": {"sample_ratio": 0.0}}
    return traced(merged(ALWAYS_HAND_OVER, faults))


@pytest.fixture(scope="module")
def local(traced):
    """Has no prefill worker, samples nothing, and has a target that nobody meets."""
    kept = {"sample_ratio": 0.0, "slo_ttft_s": 0.000001}
    return traced({"prefill_workers": 0, "telemetry": kept})


def ask(cluster, caller=None, *, max_tokens=8, text="Say hi."):
    headers = {"traceparent": caller.traceparent} if caller is not None else {}
    return httpx.post(
        f"{cluster.http_url}/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": max_tokens,
        },
        headers=headers,
        timeout=60,
        trust_env=False,
    )


def have(*names):
    """Whether all of these have come."""

    def enough(spans):
        return set(names) <= {each.name for each in spans}

    return enough


def tree(spans: list[ReceivedSpan]) -> dict[str, tuple[str, str | None]]:
    """Who made each span, and the name of what it hangs under."""
    names = {each.span_id: each.name for each in spans}
    return {each.name: (each.service, names.get(each.parent_id)) for each in spans}


def named(spans, name):
    return [each for each in spans if each.name == name]


def logged(cluster, trace_id):
    return [line for line in cluster.events("request") if line.get("trace_id") == trace_id]


def test_a_request_has_every_stages_span_under_its_callers_trace(handing_over, receiver):
    cluster, caller = handing_over, Caller()
    response = ask(cluster, caller, max_tokens=70)
    assert response.status_code == 200
    spans = receiver.wait_for(caller.trace_id, have(*HANDED_OVER))
    assert tree(spans) == HANDED_OVER
    assert len(spans) == len(HANDED_OVER)
    found = {each.name: each for each in spans}
    server = found[SERVER]
    assert server.parent_id == caller.span_id
    assert response.headers["traceresponse"] == f"00-{caller.trace_id}-{server.span_id}-01"
    # A span ends within the one that it hangs under, but for messages on their way.
    for each in spans:
        assert server.start_ns <= each.start_ns <= each.end_ns <= server.end_ns + 5_000_000_000
    assert server.attributes["gen_ai.operation.name"] == "chat"
    assert server.attributes["gen_ai.request.model"] == MODEL
    assert server.attributes["gen_ai.usage.output_tokens"] > 1
    assert server.attributes["http.response.status_code"] == 200
    sent = found["kv_transfer"].attributes
    assert sent["tandem.kv.transport"] == "shm"
    assert sent["tandem.kv.bytes"] > 0 and sent["tandem.kv.gb_per_s"] > 0
    assert sent["tandem.kv.blocks"] == found["kv_receive"].attributes["tandem.kv.blocks"]
    assert [name for name, _ in found["prefill"].events] == ["chunk"]
    assert not any(each.failed for each in spans)
    (line,) = logged(cluster, caller.trace_id)
    assert line["job"] == server.attributes["tandem.request.id"]


def test_nothing_of_what_was_said_is_in_a_span(handing_over, receiver):
    caller = Caller()
    answer = ask(handing_over, caller, text="xylophone").json()
    said = answer["choices"][0]["message"]["content"].split()[0]
    spans = receiver.wait_for(caller.trace_id, have(*HANDED_OVER))
    told = str([(each.name, each.attributes, each.events) for each in spans])
    assert "xylophone" not in told and f"'{said}" not in told


def test_steps_are_linked_and_each_chunk_is_an_event(handing_over, receiver, encode):
    caller = Caller()
    prompt = encode(PROSE * 40)[: 3 * CHUNK_TOKENS]
    with StreamClient(handing_over.grpc_target) as client:
        metadata = (("traceparent", caller.traceparent),)
        stream = client.start(generate(MODEL, prompt, max_tokens=70), metadata=metadata).wait(60)
    assert stream.ok
    spans = receiver.wait_for(caller.trace_id, have("decode", "prefill", "kv_transfer", "flush"))
    (prefill,), (decode,) = named(spans, "prefill"), named(spans, "decode")
    computed = [event["tandem.computed_tokens"] for name, event in prefill.events]
    assert computed == [CHUNK_TOKENS, 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS]
    assert [event["tandem.tokens"] for name, event in decode.events] == [32, 64]
    (server,) = named(spans, f"text_completion {MODEL}")
    assert server.attributes["rpc.response.status_code"] == "OK"
    linked = [
        span_id
        for step in receiver.spans()
        if step.name == "step"
        for trace_id, span_id in step.links
        if trace_id == caller.trace_id
    ]
    assert linked.count(prefill.span_id) == 3 and linked.count(decode.span_id) == 2
    assert not named(spans, "step")


def test_a_retried_request_has_a_span_for_each_attempt_and_is_kept_although_nobody_sampled_it(
    damaging, receiver
):
    cluster, caller = damaging, Caller(sampled=False)
    response = ask(cluster, caller)
    assert response.status_code >= 500

    def enough(spans):  # each process sends its own when it likes
        twice = ("attempt", "queue", "reserve", "kv_receive", "adopt", "prefill", "kv_transfer")
        return named(spans, SERVER) and all(len(named(spans, name)) == 2 for name in twice)

    spans = receiver.wait_for(caller.trace_id, enough)
    assert enough(spans)
    attempts = {each.attributes["tandem.attempt"]: each for each in named(spans, "attempt")}
    assert set(attempts) == {1, 2}
    for number, attempt in attempts.items():
        assert attempt.failed and attempt.attributes["error.type"] == "data_loss"
        below = [each for each in spans if each.parent_id == attempt.span_id]
        assert {each.name for each in below} == {"queue", "reserve", "kv_receive", "adopt"}
        (received,) = [each for each in below if each.name == "kv_receive"]
        sent = {each.name for each in spans if each.parent_id == received.span_id}
        assert sent == {"prefill", "kv_transfer"}
        (adopt,) = [each for each in below if each.name == "adopt"]
        assert adopt.failed, number
    (server,) = named(spans, SERVER)
    assert server.failed and server.attributes["tandem.kept"] == "error"


def test_a_request_cancelled_during_its_transfer_ends_every_span(
    handing_over, receiver, encode, eventually
):
    cluster, caller = handing_over, Caller()
    eventually(cluster.is_at_rest, "the cluster rests", timeout_s=30)
    prompt = encode(PROSE * 40)[:LONG_PROMPT_TOKENS]
    with StreamClient(cluster.grpc_target) as client:
        metadata = (("traceparent", caller.traceparent),)
        stream = client.start(generate(MODEL, prompt, max_tokens=8), metadata=metadata)
        eventually(
            lambda: cluster.state().blocks("in_transfer", "decode") > 0,
            "KV is being handed over",
            timeout_s=30,
        )
        stream.cancel()
        stream.wait(30)
    assert stream.finished is None
    spans = receiver.wait_for(
        caller.trace_id, have(f"text_completion {MODEL}", "queue", "kv_receive", "prefill")
    )
    names = {each.name for each in spans}
    assert {"attempt", "reserve", "kv_receive", "prefill"} <= names
    assert not {"adopt", "decode", "flush"} & names
    (received,), (prefill,) = named(spans, "kv_receive"), named(spans, "prefill")
    assert received.attributes["error.type"] == prefill.attributes["error.type"] == "cancelled"
    assert prefill.parent_id == received.span_id
    (server,) = named(spans, f"text_completion {MODEL}")
    assert server.attributes["rpc.response.status_code"] == "CANCELLED"
    assert not server.failed
    eventually(cluster.is_at_rest, "every block is free again", timeout_s=30)


def test_a_prompt_read_by_the_decode_worker_has_its_spans_there(local, receiver):
    caller = Caller()
    assert ask(local, caller).status_code == 200
    spans = receiver.wait_for(caller.trace_id, have(*LOCAL))
    assert tree(spans) == LOCAL
    (prefill,) = named(spans, "prefill")
    assert prefill.attributes["tandem.prefill.local"] is True
    assert {name for name, _ in prefill.events} == {"chunk"}


def test_a_missed_target_is_kept_by_every_process(local, receiver, eventually):
    """Of requests that nobody sampled, with a target that none can meet."""
    cluster = local
    response = ask(cluster)
    assert response.status_code == 200

    def lines() -> list[dict]:
        return [line for line in cluster.events("request") if line["job"] == response.json()["id"]]

    eventually(lambda: bool(lines()), "the request has its line", timeout_s=30)
    (line,) = lines()
    spans = receiver.wait_for(line["trace_id"], have(*LOCAL))
    assert tree(spans) == LOCAL
    (server,) = named(spans, SERVER)
    assert server.attributes["tandem.kept"] == "slo_ttft"
    assert server.parent_id == ""


def test_a_bad_request_is_the_clients_fault_and_has_its_span_alone(handing_over, receiver):
    caller = Caller()
    response = httpx.post(
        f"{handing_over.http_url}/v1/chat/completions",
        content=b"{",
        headers={"traceparent": caller.traceparent},
        trust_env=False,
    )
    assert response.status_code == 400
    (span,) = receiver.wait_for(caller.trace_id, lambda spans: bool(spans))
    assert (span.name, span.failed) == ("chat", False)
    assert span.attributes["http.response.status_code"] == 400


def test_the_spans_of_a_request_leave_little_of_its_time_unexplained(handing_over, receiver):
    caller = Caller()
    began_s = time.monotonic()
    assert ask(handing_over, caller, max_tokens=16).status_code == 200
    felt_s = time.monotonic() - began_s
    spans = receiver.wait_for(caller.trace_id, have(*HANDED_OVER))
    found = {each.name: each for each in spans}
    gateways = sum(found[n].duration_s for n in ("validate", "render", "tokenise", "attempt"))
    assert gateways <= found[SERVER].duration_s <= felt_s
    stages = ("queue", "reserve", "kv_receive", "adopt", "decode")
    assert sum(found[n].duration_s for n in stages) <= found["attempt"].duration_s + 1.0
    assert gateways > 0.8 * found[SERVER].duration_s


PARTS = (
    *("validate_s", "render_s", "tokenise_s", "queue_s", "retry_s", "travel_s", "grant_s"),
    *("prefill_wait_s", "prefill_compute_s", "transfer_tail_s", "adopt_s", "flush_s"),
)
NUM_TIMED = 200


@pytest.mark.timeout(300)
def test_the_parts_of_the_time_to_the_first_token_add_up_under_load(handing_over, local, encode):
    """Of handed-over prompts, and of some that the decode worker reads itself."""
    prompt = encode(PROSE * 4)
    for cluster, count in ((handing_over, NUM_TIMED), (local, NUM_TIMED // 5)):
        with StreamClient(cluster.grpc_target, at_once=12) as client:
            requests = [
                generate(MODEL, prompt[i % 50 : i % 50 + 8 + i % 60], max_tokens=3)
                for i in range(count)
            ]
            streams = client.answer_all(requests)
        timings = [stream.finished.timing for stream in streams]
        assert len(timings) == count
        for timing in timings:
            parts_s = {name: getattr(timing, name) for name in PARTS}
            assert min(parts_s.values()) >= 0
            left_s = abs(timing.ttft_s - sum(parts_s.values()))
            assert left_s <= max(0.001, 0.02 * timing.ttft_s), (timing.ttft_s, parts_s)
        # What has no better name is not where the time is.
        travel = sorted(timing.travel_s / timing.ttft_s for timing in timings)
        assert travel[count // 2] < 0.25


def test_the_parts_add_up_over_http_too(handing_over):
    body = {"model": MODEL, "prompt": "Once upon", "max_tokens": 3, "include_timing": True}
    answer = httpx.post(
        f"{handing_over.http_url}/v1/completions", json=body, timeout=60, trust_env=False
    ).json()
    timing = answer["timing"]
    left_s = abs(timing["ttft_s"] - sum(timing[name] for name in PARTS))
    assert left_s <= max(0.001, 0.02 * timing["ttft_s"]), timing


def test_a_dead_collector_costs_spans_alone(start_cluster):
    """The collector's address takes connections and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        told = {"otlp_endpoint": endpoint, "max_queued_spans": 40}
        cluster = start_cluster(settings={"prefill_workers": 0, "telemetry": told})
        for _ in range(6):
            assert ask(cluster, max_tokens=2).status_code == 200
        began_s = time.monotonic()
        assert cluster.stop() == 0
        # Three processes, one after the other, each of which gives the collector seconds.
        assert time.monotonic() - began_s < 60
    assert cluster.events("spans_not_exported")
