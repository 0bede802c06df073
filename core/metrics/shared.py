"""What a process tells of its dealings with Redis, and of whom it obeys."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.fence import Fence

if TYPE_CHECKING:
    from core.store.redis_link import RedisLink

# Every kind of failure, there from the start.
_KINDS = ("timeout", "connection", "refused", "invalid")


class RedisCollector(Collector):
    """Reads the link at the time of the scrape."""

    def __init__(self, link: "RedisLink") -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        link = self._link
        yield GaugeMetricFamily(
            "tandem_redis_away",
            "1 while the breaker is open: Redis is not asked.",
            value=float(link.away),
        )
        calls = CounterMetricFamily(
            "tandem_redis_calls", "Calls made, by operation.", labels=("operation",)
        )
        for operation, count in link.num_calls.items():
            calls.add_metric((operation,), count)
        yield calls
        failures = CounterMetricFamily(
            "tandem_redis_failures", "Calls that failed, and values refused.", labels=("kind",)
        )
        for kind in _KINDS:
            found = (count for (_, each), count in link.num_failures.items() if each == kind)
            failures.add_metric((kind,), sum(found))
        yield failures


class FenceCollector(Collector):
    """Reads the fence of a gateway or a worker at the time of the scrape."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "tandem_leader_token_seen",
            "The highest token of a leader that this process has seen.",
            value=self._fence.token,
        )
        yield CounterMetricFamily(
            "tandem_stale_leaders_refused",
            "Commands and streams of a scheduler after which another one led.",
            value=self._fence.num_refused,
        )
