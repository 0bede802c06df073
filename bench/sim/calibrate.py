"""A timing model of a cluster that runs: measured at its API, and from what its workers count."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.load.client import Target
from bench.sim.fit import least_squares
from bench.sim.probes import Prober, Probes, Tell
from bench.sim.timing import Timing
from core.errors import ConfigError, Unavailable

# What a message between two processes of one machine takes, about. What else a prompt of no length
# would take is the front's: the API's, and the client's.
_CONTROL_S = 1e-3
_MESSAGES = 6
_TIMEOUT_S = 5.0
_REPEATS = 5
# Reports come about once a second; the last one is there when several looks see the same.
_LOOK_AGAIN_S = 0.5
_REPORTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """What the scheduler's admin port tells of the workers."""

    num_blocks: int
    bytes_sent: int
    busy_s: float


def calibrate(
    target: Target,
    admin_url: str,
    *,
    block_size: int,
    name: str,
    tell: Tell = lambda line: None,
) -> Timing:
    """Measures an otherwise idle cluster of a prefill and a decode worker.

    Its prompts must all be handed over (`scheduler.local_prefill` never) and its prefix caches be
    off. Raises Unavailable where it does not answer, ConfigError where its times make no sense.
    """
    before = _pools(admin_url)
    prober = Prober(target, repeats=_REPEATS, tell=tell)
    probes = prober.probe()
    after = _settled_pools(admin_url)
    sent, busy_s = after.bytes_sent - before.bytes_sent, after.busy_s - before.busy_s
    if sent <= 0 or busy_s <= 0:
        raise ConfigError(
            "no KV was handed over: the cluster needs a prefill worker and "
            "scheduler.local_prefill = never"
        )
    return fit_probes(
        probes,
        name=name,
        num_blocks=after.num_blocks,
        block_size=block_size,
        kv_token_bytes=max(1, round(sent / (prober.num_blocks(block_size) * block_size))),
        link_bytes_per_s=sent / busy_s,
    )


def fit_probes(
    probes: Probes,
    *,
    name: str,
    num_blocks: int,
    block_size: int,
    kv_token_bytes: int,
    link_bytes_per_s: float,
) -> Timing:
    """The coefficients that come nearest to what was measured, errors relative to each time."""
    fixed_s, token_s, pair_s = least_squares(
        [(1.0, float(n), n * n / 2) for n, _ in probes.prefills],
        [seconds for _, seconds in probes.prefills],
    )
    step_s, seq_s, context_s = least_squares(
        [(1.0, float(streams), float(context)) for streams, context, _ in probes.steps],
        [seconds for _, _, seconds in probes.steps],
    )
    if token_s <= 0 or step_s <= 0:
        raise ConfigError(
            "the measured times do not grow with the work: is the machine busy with other things?"
        )
    # A step of a prompt has the same base as one that decodes, as far as there is that much.
    base_s = min(fixed_s, step_s)
    control_s = min(_CONTROL_S, (fixed_s - base_s) / _MESSAGES)
    return Timing(
        name=name,
        prefill_base_s=base_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        decode_base_s=step_s,
        decode_seq_s=seq_s,
        decode_token_s=context_s,
        kv_tokens=num_blocks * block_size,
        kv_token_bytes=kv_token_bytes,
        num_layers=1,  # whole blocks leave after the step that computed them
        link_bytes_per_s=link_bytes_per_s,
        control_s=control_s,
        front_s=max(0.0, fixed_s - base_s - _MESSAGES * control_s) / 2,
        neighbour_slowdown=max(0.0, _mean(probes.slowdowns)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _settled_pools(admin_url: str) -> Pools:
    """What the workers have counted once their reports of it have come."""
    pools, same = _pools(admin_url), 0
    while same < _REPORTS:
        time.sleep(_LOOK_AGAIN_S)
        last, pools = pools, _pools(admin_url)
        same = same + 1 if pools == last else 0
    return pools


def _pools(admin_url: str) -> Pools:
    try:
        response = httpx.get(f"{admin_url}/cluster", timeout=_TIMEOUT_S, trust_env=False)
        response.raise_for_status()
        workers: list[dict[str, Any]] = response.json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise Unavailable(f"no scheduler's admin server at {admin_url}: {error!r}") from error
    decodes = [worker for worker in workers if worker["role"] == "decode"]
    if not decodes:
        raise Unavailable("no decode worker is ready")
    counters = [item for worker in workers for item in worker["counters"].items()]
    return Pools(
        num_blocks=min(worker["num_blocks"] for worker in decodes),
        bytes_sent=sum(value for key, value in counters if key.endswith("_bytes_sent")),
        busy_s=sum(value for key, value in counters if key.endswith("_busy_us")) / 1e6,
    )
