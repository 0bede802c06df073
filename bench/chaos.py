"""Whether the hand-off keeps its promises while everything that can go wrong with it does.

`python -m bench.chaos` serves the default model in float32 with two workers of each kind whose
senders drop, delay, double, reorder, truncate, corrupt and stall what they write, and now and then
freeze or kill their own process. It sends some two thousand requests over several seeds, transports
and ways to push, and compares every token with a run without faults. A request may fail, by what it
lost twice; it may not be answered wrongly, end twice or never, or leave a block behind. Ends with
one line of JSON; exits with 1 where a promise was broken.
"""

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.chaos_account import EVENTS, Account
from bench.cluster import ALWAYS_HAND_OVER, Endpoints, Settings, merged, serving
from bench.cluster_view import LedgerWatch, look
from bench.log_events import read_events
from bench.parity_prompts import PROSE
from bench.streams import StreamClient, generate
from core.config import DEFAULT_MODEL
from core.model_card import ModelCard
from protos.tandem.v1.inference_pb2 import GenerateRequest

NUM_WORKERS = 4
_AT_ONCE = 64
_REPEATS = 4  # of each request, in each run
_DEADLINE_S = 120.0
# A frozen writer is killed after six seconds, and its successor loads the model.
_REST_S = 60.0
_REST_POLL_S = 0.2
# Per write of a whole block; a layer's share of one is a thirtieth of that.
_ODDS = {
    "drop": 0.004,
    "truncate": 0.004,
    "corrupt": 0.01,
    "duplicate": 0.02,
    "reorder": 0.02,
    "delay": 0.02,
    "stall": 0.002,
    "freeze": 0.0005,
    "kill": 0.0005,
}
_LAYER_SHARE = 1 / 15  # not every block goes layer by layer
_TIMES = "delay_s=0.005,stall_s=0.5"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One cluster under one seed."""

    transport: str
    push: str
    seed: int

    def faults(self, odds: dict[str, float]) -> str:
        """What `transfer.faults` is set to."""
        share = _LAYER_SHARE if self.push == "layers" else 1.0
        parts = [f"{kind}={p * share:g}" for kind, p in odds.items()]
        return ",".join([f"seed={self.seed}", *parts, _TIMES])


# Seeds by which workers are killed and frozen, but not so early on a connection that they never get
# anywhere: a connection of the next life draws the same again.
RUNS = (
    Run(transport="shm", push="blocks", seed=55),
    Run(transport="tcp", push="blocks", seed=70),
    Run(transport="shm", push="layers", seed=7),
    Run(transport="tcp", push="layers", seed=21),
)


def make_requests(
    tokenizer_path: Path, count: int, *, longest: int, most_tokens: int
) -> list[GenerateRequest]:
    """Prompts of 16 to `longest` tokens, no two alike, for 4 to `most_tokens` sampled tokens.

    Most are short, as more of them can be had in the time. Sampled, since a wrong block may leave
    the likeliest token as it was; among the 20 likeliest, whose order does not hang on rounding.
    """
    from tokenizers import Tokenizer

    prose = Tokenizer.from_file(str(tokenizer_path)).encode(PROSE * 3).ids
    chance = random.Random(0)
    requests = []
    for seed in range(count):
        first = chance.randrange(len(prose) - longest)
        prompt = prose[first : first + 16 + round((longest - 16) * chance.random() ** 3)]
        chance.shuffle(prompt)
        tokens = 4 + round((most_tokens - 4) * chance.random() ** 2)
        requests.append(
            generate(
                DEFAULT_MODEL,
                prompt,
                temperature=1.0,
                top_k=20,
                seed=seed,
                max_tokens=tokens,
                ignore_eos=True,
            )
        )
    return requests


def settings(transport: str, push: str, faults: str = "") -> Settings:
    """Small pools, so that freed blocks are soon wanted again; retries as many as it takes."""
    wanted = {
        "prefill_workers": 2,
        "decode_workers": 2,
        "log_format": "json",
        "log_level": "warning",
        "gateway": {
            "retry_budget_ratio": 1.0,
            "retry_budget_floor": 1000,
            "quarantine_s": 0.0,
        },
        "scheduler": {"report_interval_s": 0.2},
        "engine": {
            "dtype": "float32",
            "max_step_tokens": 128,
            "threads": 1,
            "prefill_kv_bytes": 2**27,
            "decode_kv_bytes": 2**27,
        },
        "transfer": {
            "transport": transport,
            "push": push,
            "arrive_timeout_s": 1.0,
            "faults": faults,
        },
    }
    return merged(ALWAYS_HAND_OVER, wanted)


def undisturbed(
    endpoints: Endpoints, requests: Sequence[GenerateRequest]
) -> list[tuple[int, ...] | None]:
    """The tokens that each request gets without faults; None where rounding decides between two.

    That is told by asking twice, with more company and with less.
    """
    answers = []
    for at_once in (_AT_ONCE, _AT_ONCE // 4):
        with StreamClient(endpoints.grpc, at_once=at_once) as client:
            streams = client.answer_all(requests, timeout_s=_DEADLINE_S)
        if failed := [stream.details for stream in streams if not stream.ok]:
            raise RuntimeError(f"{len(failed)} requests failed without faults: {failed[0]}")
        answers.append([tuple(stream.token_ids) for stream in streams])
    return [one if one == other else None for one, other in zip(*answers, strict=True)]


def run_through(
    endpoints: Endpoints,
    requests: Sequence[GenerateRequest],
    expected: Sequence[Sequence[int]],
    account: Account,
) -> None:
    """Sends the requests to a cluster with faults, and adds what came of them to the account."""
    with LedgerWatch(endpoints.admin) as watch:
        with StreamClient(endpoints.grpc, at_once=_AT_ONCE) as client:
            streams = client.answer_all(requests, timeout_s=_DEADLINE_S)
        account.lost_blocks += num_lost_blocks(endpoints.admin)
    account.add_run(streams, expected, read_events(endpoints.log, *EVENTS))
    account.unbalanced += len(watch.unbalanced)
    account.max_quarantined = max(account.max_quarantined, watch.max_quarantined)


def num_lost_blocks(admin_url: str) -> int:
    """Blocks that are not free once all workers are back and have had their time."""
    deadline_s = time.monotonic() + _REST_S
    while True:
        try:
            state = look(admin_url)
        except httpx.HTTPError:
            state = None
        if state is not None and state.at_rest(NUM_WORKERS):
            return 0
        if time.monotonic() > deadline_s:
            if state is None or len(state.workers) < NUM_WORKERS:
                raise RuntimeError(f"not all workers came back: {state}")
            return sum(worker.num_held_blocks for worker in state.workers)
        time.sleep(_REST_POLL_S)


def main() -> None:
    """Runs them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2080, help="over all runs")
    parser.add_argument("--runs", type=int, default=len(RUNS), help="how many of the runs")
    args = parser.parse_args()
    runs = RUNS[: args.runs]
    prepared = subprocess.run(
        [sys.executable, "-m", "engine.prepare", DEFAULT_MODEL], stdout=subprocess.PIPE, check=True
    )
    card = ModelCard.load(Path(prepared.stdout.decode().strip()))
    begin_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin_s:4.0f} s  {text}", file=sys.stderr, flush=True)

    num_distinct = -(-args.requests // (_REPEATS * len(runs)))
    distinct = make_requests(card.tokenizer_path, num_distinct, longest=200, most_tokens=12)
    with serving(settings("shm", "blocks")) as endpoints:
        answers = undisturbed(endpoints, distinct)
    known = [(ask, tokens) for ask, tokens in zip(distinct, answers, strict=True) if tokens]
    say(f"{len(known)} of {len(distinct)} requests have one answer without faults")
    requests = [ask for ask, _ in known] * _REPEATS
    expected = [tokens for _, tokens in known] * _REPEATS
    account = Account()
    for run in runs:
        with serving(settings(run.transport, run.push, run.faults(_ODDS))) as endpoints:
            run_through(endpoints, requests, expected, account)
        say(f"{run}: {dict(account.outcomes)} so far, faults {dict(account.faults)}")
    result = {
        **vars(account),
        "runs": len(runs),
        "seconds": round(time.monotonic() - begin_s, 1),
        "sound": account.sound,
    }
    print(json.dumps(result))
    sys.exit(0 if account.sound else 1)


if __name__ == "__main__":
    main()
