"""`python -m bench.tracing`: what tracing every request costs; ends with one JSON line.

First the code alone: a request's spans of one process, recorded, encoded and sent to a collector
that takes everything, per span. Then two clusters side by side, one of which traces all requests,
under the same load in turns: processor time and wall time per output token. On a machine with other
work the processor time is the one to read.
"""

import argparse
import json
import os
import statistics
import time

from bench.cluster import ALWAYS_HAND_OVER, Endpoints, Settings, merged, serving
from bench.otlp_receiver import OtlpReceiver
from bench.process_tree import ProcessTree
from bench.streams import StreamClient, generate
from core.config import TelemetryConfig
from core.messages import WorkerRef
from core.telemetry.names import Attr, Event, Role, SpanName
from core.telemetry.setup import tracing
from core.telemetry.tracer import Tracer

_ME = WorkerRef(name="decode-0", incarnation="0123abcd")
_WORKER = "prefill-0/0123abcd"
_FROM_GATEWAY = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_SETTINGS: Settings = merged(
    ALWAYS_HAND_OVER,
    {
        "engine": {"prefix_cache": False, "prefill_kv_bytes": 2**29, "decode_kv_bytes": 2**29},
        "log_level": "warning",
    },
)


def span_cost_us(num_requests: int, *, on: bool) -> float:
    """Processor time for each stage of a request, in µs: a decode worker's four, one of which has
    events, as they are recorded, encoded and sent. Off: what the same calls cost where nobody
    traces."""
    num_stages = 4
    with OtlpReceiver() as receiver:
        endpoint = receiver.endpoint if on else None
        config = TelemetryConfig(otlp_endpoint=endpoint, max_queued_spans=10**7)
        with tracing(config, Role.DECODE_WORKER, _ME) as tracer:
            # The receiver runs in this process too: its share is measured apart and taken off.
            began_s = time.process_time()
            for number in range(num_requests):
                _decode_workers_part(tracer, f"r{number}")
            num_spans = num_requests * num_stages if on else 0
            while sum(tracer.counters().values()) < num_spans:
                time.sleep(0.01)
            spent_s = time.process_time() - began_s
        return (spent_s - receiver.busy_s) / num_requests / num_stages * 1e6


def _decode_workers_part(tracer: Tracer, request_id: str) -> None:
    trace = tracer.work(request_id, _FROM_GATEWAY)
    now_s = time.monotonic()
    for name in (SpanName.RESERVE, SpanName.KV_RECEIVE, SpanName.ADOPT):
        span = trace.begin(name, now_s)
        span.set({Attr.PREFILL_WORKER: _WORKER, Attr.BLOCKS: 12, Attr.TRANSPORT: "shm"})
        span.end(now_s)
    span = trace.begin(SpanName.DECODE, now_s)
    for tokens in (32, 64, 96, 128):
        span.event(Event.TOKENS, now_s, {Attr.TOKENS: tokens})
    span.set({Attr.OUTPUT_TOKENS: 128})
    trace.finish(now_s)


def load(cluster: Endpoints, num_requests: int, num_tokens: int) -> tuple[float, float]:
    """(processor seconds, wall seconds) per output token of one round."""
    assert cluster.pid is not None
    tree = ProcessTree(cluster.pid)
    requests = [
        generate(cluster.model, range(100 + i, 164 + i), max_tokens=num_tokens, ignore_eos=True)
        for i in range(num_requests)
    ]
    with StreamClient(cluster.grpc, at_once=8) as client:
        cpu_s, began_s = tree.cpu_s(), time.monotonic()
        streams = client.answer_all(requests)
        wall_s = time.monotonic() - began_s
    made = sum(len(stream.token_ids) for stream in streams)
    return (tree.cpu_s() - cpu_s) / made, wall_s / made


def main() -> None:
    """Measures both and prints them."""
    parser = argparse.ArgumentParser(prog="bench.tracing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=24, help="of one round")
    parser.add_argument("--tokens", type=int, default=48, help="of one answer")
    parser.add_argument("--spans-only", action="store_true", help="the code alone")
    args = parser.parse_args()
    on = [span_cost_us(2000, on=True) for _ in range(5)]
    off = [span_cost_us(2000, on=False) for _ in range(5)]
    found: dict[str, object] = {
        "cpu_us_per_stage": round(statistics.median(on), 2),
        "cpu_us_per_stage_off": round(statistics.median(off), 3),
    }
    print(
        f"a stage of a request: {statistics.median(on):.1f} µs of CPU, "
        f"{statistics.median(off):.2f} where nobody traces"
    )
    if not args.spans_only:
        found |= _clusters(args.rounds, args.requests, args.tokens)
    print(json.dumps(found))


def _clusters(rounds: int, num_requests: int, num_tokens: int) -> dict[str, object]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cpu: list[float] = []
    wall: list[float] = []
    with OtlpReceiver() as receiver:
        traced = merged(_SETTINGS, {"telemetry": {"otlp_endpoint": receiver.endpoint}})
        with serving(_SETTINGS) as plain, serving(traced) as tracing:
            for cluster in (plain, tracing):
                load(cluster, num_requests, num_tokens)
            for number in range(rounds):
                # Whoever comes second may find a warmer or a busier machine: take turns.
                order = (plain, tracing) if number % 2 == 0 else (tracing, plain)
                told = {each.pid: load(each, num_requests, num_tokens) for each in order}
                cpu.append(told[tracing.pid][0] / told[plain.pid][0])
                wall.append(told[tracing.pid][1] / told[plain.pid][1])
                print(
                    f"round {number}: {cpu[-1]:.3f} of the CPU a token, {wall[-1]:.3f} of the time"
                )
        num_spans = len(receiver.spans())
    return {
        "cpu_per_token_ratio": round(statistics.median(cpu), 4),
        "wall_per_token_ratio": round(statistics.median(wall), 4),
        "rounds": rounds,
        "spans": num_spans,
    }


if __name__ == "__main__":
    main()
