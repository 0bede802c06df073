"""What a stream feels when its decode worker turns: the gap before its next token.

`python -m bench.turns` serves the default model by one prefill and two decode workers that can
turn, lets streams with long prompts decode, and has one of the decode workers turn under them,
again and again. Its streams go on at the other one, which fetches prompt and answer from the prefix
cache of the worker that turned. The same without prefix caches, where somebody has to read all of
it again, is the other arm. Every stream's tokens are compared with an undisturbed run's. Ends with
one line of JSON; exits with 1 where a token was wrong or a stream failed.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass

import httpx

from bench.cluster import Endpoints, serving
from bench.log_events import read_events
from bench.streams import StreamClient, TokenStream, generate
from protos.tandem.v1.inference_pb2 import GenerateRequest

_POLL_S = 0.02
_TURN_S = 60.0
_ANSWER_TOKENS = 96
_BEGUN_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """One turn under running streams. Gaps are the longest between two tokens of a stream."""

    turn_s: float
    num_moved: int
    moved_gap_s: float
    other_gap_s: float
    num_wrong: int


def _requests(model: str, num_streams: int, prompt_tokens: int) -> list[GenerateRequest]:
    """Prompts that share nothing, so that only the worker itself has their blocks."""
    return [
        generate(
            model,
            [1000 + (7919 * (number + 1) * (at + 1)) % 40_000 for at in range(prompt_tokens)],
            max_tokens=_ANSWER_TOKENS,
            ignore_eos=True,
        )
        for number in range(num_streams)
    ]


def _scale(admin: str, prefill: int, decode: int) -> float:
    """Seconds until it is so."""
    began_s = time.monotonic()
    body = {"prefill": prefill, "decode": decode}
    httpx.post(f"{admin}/scale", json=body, trust_env=False).raise_for_status()
    while time.monotonic() - began_s < _TURN_S:
        found = httpx.get(f"{admin}/scale", trust_env=False).json()
        if found["now"] == body and not any(each["turning"] for each in found["workers"]):
            return time.monotonic() - began_s
        time.sleep(_POLL_S)
    raise RuntimeError(f"{prefill} + {decode} was not reached within {_TURN_S:.0f} s")


def _longest_gap_s(stream: TokenStream, since_s: float, until_s: float) -> float:
    """Between two tokens, of which the later one came in this time."""
    times = stream.arrived_s
    gaps = [b - a for a, b in itertools.pairwise(times) if since_s <= b <= until_s]
    return max(gaps, default=0.0)


def _turn_once(
    endpoints: Endpoints, requests: list[GenerateRequest], expected: list[list[int]]
) -> Turned:
    moved_before = len(read_events(endpoints.log, "moving"))
    with StreamClient(endpoints.grpc) as client:
        streams = [client.start(request, timeout_s=300.0) for request in requests]
        deadline_s = time.monotonic() + 120.0
        while not all(len(each.token_ids) >= _BEGUN_TOKENS for each in streams):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the streams did not begin")
            time.sleep(_POLL_S)
        began_s = time.monotonic()
        turn_s = _scale(endpoints.admin, 2, 1)
        for stream in streams:
            stream.wait(300.0)
    num_moved = len(read_events(endpoints.log, "moving")) - moved_before
    window = (began_s, began_s + turn_s + 5.0)
    gaps = sorted((_longest_gap_s(each, *window) for each in streams), reverse=True)
    _scale(endpoints.admin, 1, 2)
    wrong = sum(each.token_ids != want for each, want in zip(streams, expected, strict=True))
    return Turned(
        turn_s=turn_s,
        num_moved=num_moved,
        moved_gap_s=statistics.median(gaps[:num_moved]) if num_moved else 0.0,
        other_gap_s=statistics.median(gaps[num_moved:]) if num_moved < len(gaps) else 0.0,
        num_wrong=wrong,
    )


def measure(args: argparse.Namespace, *, prefix_cache: bool) -> list[Turned]:
    """The turns of one arm, on a cluster of its own."""
    settings = {
        "prefill_workers": 1,
        "decode_workers": 2,
        "log_format": "json",
        "scheduler": {"elastic": "auto", "elastic_patience_s": 3600.0, "report_interval_s": 0.2},
        "engine": {
            "dtype": "float32",
            "threads": 1,
            "prefix_cache": prefix_cache,
            "decode_kv_bytes": 2**30,
        },
    }
    with serving(settings) as endpoints:
        requests = _requests(endpoints.model, args.streams, args.prompt_tokens)
        with StreamClient(endpoints.grpc) as client:
            expected = [each.token_ids for each in client.answer_all(requests, timeout_s=300.0)]
        return [_turn_once(endpoints, requests, expected) for _ in range(args.rounds)]


def main() -> int:
    """Measures both arms; gives the exit code."""
    parser = argparse.ArgumentParser(description="Measure what a stream feels of a turn.")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    told: dict[str, object] = {}
    gaps: dict[str, float] = {}
    num_wrong = 0
    for name, cached in {"fetched": True, "read_again": False}.items():
        turns = measure(args, prefix_cache=cached)
        gaps[name] = statistics.median(each.moved_gap_s for each in turns)
        num_wrong += sum(each.num_wrong for each in turns)
        told[name] = {
            "turn_s": round(statistics.median(each.turn_s for each in turns), 3),
            "moved_gap_s": round(gaps[name], 3),
            "other_gap_s": round(statistics.median(each.other_gap_s for each in turns), 3),
            "num_moved": sum(each.num_moved for each in turns),
            "num_wrong": sum(each.num_wrong for each in turns),
        }
        print(f"{name}: {told[name]}", flush=True)
    told["read_again_over_fetched"] = round(gaps["read_again"] / max(gaps["fetched"], 1e-9), 2)
    print(json.dumps({"bench": "turns", **told}))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
