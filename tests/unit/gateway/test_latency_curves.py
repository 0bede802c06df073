"""Percentiles of the last half minute, and nothing of what came before it."""

import pytest

from core.config import TelemetryConfig
from gateway.latency_curves import _WINDOW, LatencyCurves, histogram_quantile
from gateway.recent import RecentRequests
from gateway.request_metrics import unread_metrics


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
