"""Freezes Redis under load and compares what clients see with before: `make bench-redis`.

One cluster with a real `redis-server`, API keys with quotas and resumable streams, so that every
request asks Redis. Chats are sent at a steady rate; for the middle part of the run the server is
stopped (SIGSTOP), so that its connections stay open and nothing answers. Ends with one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster import Endpoints, serving
from bench.redis_server import redis_server
from core.api_keys import KeyEntry, entry_toml, hash_of, new_key

_QUOTA = 10**9
_ANSWER_TOKENS = 8
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one client saw: the part of the run it came in, its TTFT or what went wrong."""

    frozen: bool
    ttft_s: float | None
    error: str | None = None


async def _chat(client: httpx.AsyncClient, endpoints: Endpoints, number: int, frozen: bool) -> Seen:
    began_s = time.monotonic()
    body = {
        "model": endpoints.model,
        "messages": [{"role": "user", "content": f"Say the number {number} in words."}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    ttft_s: float | None = None
    try:
        async with client.stream(
            "POST", f"{endpoints.http}/chat/completions", json=body
        ) as response:
            if response.status_code != 200:
                return Seen(frozen=frozen, ttft_s=None, error=str(response.status_code))
            last = ""
            async for line in response.aiter_lines():
                if ttft_s is None and line.startswith("data:"):
                    ttft_s = time.monotonic() - began_s
                last = line or last
        error = None if last == "data: [DONE]" else "cut off"
    except httpx.HTTPError as failed:
        error = type(failed).__name__
    return Seen(frozen=frozen, ttft_s=ttft_s, error=error)


async def _load(
    endpoints: Endpoints, key: str, *, rate: float, parts: list[tuple[float, bool]], freeze: object
) -> list[Seen]:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    tasks: list[asyncio.Task[Seen]] = []
    async with httpx.AsyncClient(
        timeout=_TIMEOUT_S, limits=limits, headers=headers, trust_env=False
    ) as client:
        for duration_s, frozen in parts:
            assert callable(freeze)
            freeze(frozen)
            end_s, next_s = time.monotonic() + duration_s, time.monotonic()
            while next_s < end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                tasks.append(asyncio.create_task(_chat(client, endpoints, len(tasks), frozen)))
                next_s += 1 / rate
        return list(await asyncio.gather(*tasks))


def _summary(seen: list[Seen]) -> dict[str, object]:
    ttfts = sorted(each.ttft_s for each in seen if each.ttft_s is not None)
    cuts = statistics.quantiles(ttfts, n=100, method="inclusive")
    return {
        "requests": len(seen),
        "errors": sum(each.error is not None for each in seen),
        "ttft_p50_ms": round(1000 * cuts[49], 1),
        "ttft_p99_ms": round(1000 * cuts[98], 1),
        "ttft_max_ms": round(1000 * ttfts[-1], 1),
    }


def main() -> None:
    """Runs it and prints a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=4.0, help="Chats a second.")
    parser.add_argument("--frozen-s", type=float, default=60.0, help="How long Redis is frozen.")
    args = parser.parse_args()
    key = new_key()
    entry = KeyEntry(
        id="bench",
        hash=hash_of(key),
        tenant="bench",
        requests_per_minute=_QUOTA,
        tokens_per_minute=_QUOTA,
    )
    parts = [
        (10.0, False),
        (args.frozen_s, False),
        (args.frozen_s, True),
        (args.frozen_s / 2, False),
    ]
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        keys = Path(folder) / "keys.toml"
        keys.write_text(entry_toml(entry))
        settings = {
            "redis": {"url": redis.url},
            "gateway": {"api_keys_file": str(keys), "resume": True},
        }

        def freeze(frozen: bool) -> None:
            (redis.freeze if frozen else redis.thaw)()

        with serving(settings) as endpoints:
            seen = asyncio.run(_load(endpoints, key, rate=args.rate, parts=parts, freeze=freeze))
        redis.thaw()
    warm = round(10 * args.rate)
    usual = [each for each in seen[warm:] if not each.frozen]
    frozen = [each for each in seen if each.frozen]
    told = {"usual": _summary(usual), "frozen": _summary(frozen)}
    p99 = [float(str(part["ttft_p99_ms"])) for part in (told["frozen"], told["usual"])]
    print(json.dumps({**told, "p99_added_ms": round(p99[0] - p99[1], 1), "rate_per_s": args.rate}))


if __name__ == "__main__":
    main()
