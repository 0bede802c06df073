"""`python -m bench.lb`: processor time that a load balancer takes for a streamed token.

Two gateways run over sources that give each stream a token every 50 ms; the same streams go through
each load balancer that is installed, with the file that lies in deploy/lb. Rounds alternate. Ends
with one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from typing import Any

from bench.gateway.__main__ import CLIENTS, STREAMS, Gateway, started
from bench.lb.balancers import PROGRAMS, balancing, installed
from bench.process_tree import ProcessTree
from core.config import DEFAULT_MODEL

GOAL_US_PER_TOKEN = 80.0
_WARM_TICKS = 10


async def measure(card_folder: str, rounds: int, ticks: int) -> dict[str, Any]:
    """Medians by balancer and protocol, and each round."""
    found: dict[str, Any] = {"streams": STREAMS, "ticks": ticks}
    async with started(card_folder) as first, started(card_folder) as second:
        gateways = (first, second)
        http = [gateway.ports["sse"] for gateway in gateways]
        grpc = [gateway.ports["grpc"] for gateway in gateways]
        for name in PROGRAMS:
            if installed(name) is None:
                say(f"{name} is not installed")
                continue
            with balancing(name, http=http, grpc=grpc) as balancer:
                ports = {"sse": balancer.http, "grpc": balancer.grpc}
                tree = ProcessTree(balancer.pid)
                taken: dict[str, list[dict[str, float]]] = {each: [] for each in CLIENTS}
                for _ in range(rounds):
                    for protocol, port in ports.items():
                        taken[protocol].append(await _one(gateways, tree, protocol, port, ticks))
            for protocol, rounds_of_it in taken.items():
                spent = [one["us"] for one in rounds_of_it]
                found[f"{name}_{protocol}_us_per_token"] = round(statistics.median(spent), 1)
                found[f"{name}_{protocol}_rounds"] = [round(one, 1) for one in spent]
                worst = max(one["share"] for one in rounds_of_it)
                found[f"{name}_{protocol}_worst_share"] = round(worst, 3)
                say(f"{name}, {protocol}: {found[f'{name}_{protocol}_us_per_token']} us a token")
    return found


async def _one(
    gateways: tuple[Gateway, Gateway], tree: ProcessTree, protocol: str, port: int, ticks: int
) -> dict[str, float]:
    """One round: microseconds a token, and the larger gateway's share of the tokens."""
    async with CLIENTS[protocol](port, STREAMS, ticks + 2 * _WARM_TICKS):
        await asyncio.gather(*(each.order("stream", ticks=_WARM_TICKS) for each in gateways))
        before_s = tree.cpu_s()
        both = await asyncio.gather(*(each.order("stream", ticks=ticks) for each in gateways))
        spent_s = tree.cpu_s() - before_s
    tokens = [one["tokens"] for one in both]
    assert sum(tokens) > 0.9 * STREAMS * ticks, both
    return {"us": spent_s / sum(tokens) * 1e6, "share": max(tokens) / sum(tokens)}


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measures; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=100, help="tokens of each stream in a round")
    args = parser.parse_args()
    prepared = subprocess.run(
        [sys.executable, "-m", "engine.prepare", DEFAULT_MODEL], stdout=subprocess.PIPE, check=True
    )
    found = asyncio.run(measure(prepared.stdout.decode().strip(), args.rounds, args.ticks))
    missed = [
        name
        for name, value in found.items()
        if name.endswith("_us_per_token") and value > GOAL_US_PER_TOKEN
    ]
    print(json.dumps({**found, "goal_us_per_token": GOAL_US_PER_TOKEN, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
