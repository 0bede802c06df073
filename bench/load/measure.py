"""One load on one server, from warm-up to figures."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.client import LoadClient, Target
from bench.load.drive import closed_loop, open_loop
from bench.load.plan import LoadPlan, Place
from bench.load.request import Failure, Record
from bench.load.summary import Summary, summarise
from core.errors import TandemError


class WarmUpFailed(TandemError):
    """The server does not answer this load at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`client_cpu_share` is the cores that the client itself took while it measured."""

    records: Sequence[Record]
    summary: Summary
    client_cpu_share: float


def warm_up(target: Target, plan: LoadPlan, place: Place) -> Failure | None:
    """Sends the requests that do not count; the first error, if there is one."""
    requests = plan.warm_up(place)
    client = _client(target, plan)
    records = asyncio.run(closed_loop(client, requests, concurrency=plan.concurrency or 1))
    return next((record.failure for record in records if record.failure is not None), None)


def measure(target: Target, plan: LoadPlan, place: Place) -> Measurement:
    """Sends the load and waits for its end. Errors are in the records."""
    requests = plan.measured(place)
    client = _client(target, plan)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    if plan.rate is not None:
        records = asyncio.run(open_loop(client, requests, plan.arrivals_s(place)))
    else:
        assert plan.concurrency is not None, "a checked plan"
        records = asyncio.run(closed_loop(client, requests, concurrency=plan.concurrency))
    took_s = time.perf_counter() - began_s
    return Measurement(
        records=records,
        summary=summarise(records, plan.slo),
        client_cpu_share=(time.process_time() - began_cpu_s) / took_s,
    )


def measure_once(target: Target, plan: LoadPlan, place: Place) -> Measurement:
    """After a warm-up. Raises WarmUpFailed where that gets no answer: nothing else would."""
    if (failure := warm_up(target, plan, place)) is not None:
        raise WarmUpFailed(f"{target.address.url}: {failure.kind}: {failure.detail}")
    return measure(target, plan, place)


def _client(target: Target, plan: LoadPlan) -> LoadClient:
    return LoadClient(target, ignore_eos=plan.ignore_eos, timeout_s=plan.timeout_s)
