"""Figures out of records, checked by hand and against numpy."""

import random

import numpy as np
import pytest

from bench.load.request import Failure, Record
from bench.load.summary import Distribution, Slo, percentile, summarise


def record(
    *times_s: float, intended_s: float = 0.0, tokens: int | None = None, **fields: object
) -> Record:
    values: dict[str, object] = {
        "intended_s": intended_s,
        "sent_s": intended_s,
        "token_times_s": times_s,
        "finished_s": max((*times_s, intended_s)),
        "max_tokens": len(times_s),
        "completion_tokens": len(times_s) if tokens is None else tokens,
        **fields,
    }
    return Record(**values)


def failed(kind: str = "timeout", **fields: object) -> Record:
    return record(failure=Failure(kind=kind, detail=""), **fields)


@pytest.mark.parametrize("count", [1, 2, 5, 100])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: int):
    chance = random.Random(count)
    values = sorted(chance.random() for _ in range(count))
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_latency_counts_from_when_a_request_was_to_be_sent():
    late = record(3.0, 4.0, 6.0, intended_s=1.0, sent_s=2.5)
    assert (late.ttft_s, late.e2e_s, late.itls_s) == (2.0, 5.0, [1.0, 2.0])
    assert summarise([late], Slo()).max_late_ms == 1500


def test_tpot_is_over_tokens_and_itl_over_events():
    packed = record(1.0, 3.0, tokens=5)
    assert (packed.tpot_s, packed.itls_s) == (0.5, [2.0])


def test_an_answer_of_one_token_has_no_time_per_further_token():
    found = summarise([record(1.0)], Slo())
    assert (found.tpot_ms, found.itl_ms) == (None, None)
    assert found.ttft_ms == Distribution(count=1, mean=1000, p50=1000, p90=1000, p99=1000, max=1000)


def test_rates_are_those_of_the_whole_run_and_of_complete_answers():
    records = [record(1.0, 2.0), record(2.0, 3.0, 4.0), failed(intended_s=0.0, finished_s=5.0)]
    found = summarise(records, Slo())
    assert (found.requests, found.completed, found.errors) == (3, 2, {"timeout": 1})
    assert (found.duration_s, found.output_tokens) == (5.0, 5)
    assert (found.output_tokens_per_s, found.requests_per_s) == (1.0, 0.4)
    assert found.goodput_requests_per_s is None


def test_goodput_counts_answers_that_keep_both_bounds():
    records = [
        record(0.1, 0.2),
        record(0.9, 1.0),  # its first token is late
        record(0.1, 0.9),  # its second one
        record(0.1),  # no second one that could be late
        failed(finished_s=2.0),
    ]
    found = summarise(records, Slo(ttft_ms=500, tpot_ms=500))
    assert found.goodput_requests_per_s == 1.0
    assert summarise(records, Slo(ttft_ms=500)).goodput_requests_per_s == 1.5


def test_a_load_that_failed_whole_still_has_figures():
    found = summarise([failed("http_503"), failed("http_503"), failed("timeout")], Slo(ttft_ms=1))
    assert (found.completed, found.output_tokens_per_s, found.ttft_ms) == (0, 0.0, None)
    assert found.errors == {"http_503": 2, "timeout": 1}


def test_short_answers_and_cached_tokens_are_counted_where_they_are_told():
    told = record(1.0, max_tokens=4, prompt_tokens=9, cached_tokens=6)
    found = summarise([told, record(1.0, prompt_tokens=9)], Slo())
    assert (found.short_answers, found.prompt_tokens, found.cached_tokens) == (1, 18, 6)
    assert summarise([record(1.0)], Slo()).cached_tokens is None
