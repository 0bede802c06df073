"""Percentiles of the last half minute, and nothing of what came before it."""

import pytest

from core.config import TelemetryConfig
from gateway.latency_curves import _WINDOW, LatencyCurves, histogram_quantile
from gateway.recent import RecentRequests
from gateway.request_metrics import unread_metrics
from gateway.request_record import RequestRecord


@pytest.mark.parametrize(
    "counts, q, quantile",
    [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([2, 2, 0, 0], 0.5, 1.0),
        ([2, 2, 0, 0], 0.75, 1.5),
        ([0, 0, 0, 3], 0.5, 4.0),
    ],
)
def test_a_quantile_lies_evenly_within_its_bucket(counts, q, quantile):
    assert histogram_quantile([1.0, 2.0, 4.0], counts, q) == quantile


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_sample_is_of_the_window_before_it():
    metrics, clock = unread_metrics("m", TelemetryConfig()), Clock()
    curves = LatencyCurves([metrics], RecentRequests(10), clock=clock)
    metrics.inter_token_s.observe(0.03, 10)
    metrics.generation_tokens.inc(20)
    clock.now_s += 2
    curves.sample()
    for _ in range(_WINDOW):
        clock.now_s += 2
        curves.sample()
    told = curves.told()
    first, last = told["samples"][0], told["samples"][-1]
    assert first["tokens_per_s"] == 10.0
    assert 0.025 <= first["itl_p50_s"] <= 0.05
    assert first["ttft_p50_s"] is None
    assert (last["tokens_per_s"], last["itl_p50_s"]) == (0.0, None)


def test_each_model_has_curves_of_its_own():
    slow, fast = (unread_metrics(name, TelemetryConfig()) for name in ("slow", "fast"))
    clock, recent = Clock(), RecentRequests(10)
    curves = LatencyCurves([slow, fast], recent, clock=clock)
    assert curves.told()["models"] == {"slow": None, "fast": None}
    slow.inter_token_s.observe(0.9, 10)
    fast.inter_token_s.observe(0.01, 30)
    fast.generation_tokens.inc(30)
    recent.add(RequestRecord(operation="chat", model="slow", ttft_s=3.0), 200)
    clock.now_s += 2
    curves.sample()
    (all_of_us,) = curves.told()["samples"]
    (of_slow,) = curves.told("slow")["samples"]
    (of_fast,) = curves.told("fast")["samples"]
    assert curves.told()["models"] == {"slow": of_slow, "fast": of_fast}
    assert of_slow["itl_p50_s"] > 0.5 > 0.02 > of_fast["itl_p50_s"]
    assert (of_slow["ttft_p50_s"], of_fast["ttft_p50_s"]) == (3.0, None)
    assert (of_slow["tokens_per_s"], of_fast["tokens_per_s"]) == (0.0, 15.0)
    assert (all_of_us["tokens_per_s"], all_of_us["ttft_p50_s"]) == (15.0, 3.0)
    with pytest.raises(KeyError):
        curves.told("another")
