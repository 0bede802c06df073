"""What the gateway tells of its dealings with the cluster, read at the time of the scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.session import ClusterBackend

# Why an attempt can be tried again: there from the start, with zero.
_RETRY_REASONS = ("worker_lost", "unavailable", "overloaded", "data_loss", "incompatible")


class ClusterCollector(Collector):
    """Keeps nothing."""

    def __init__(self, backend: ClusterBackend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        backend = self._backend
        retries = CounterMetricFamily(
            "tandem_retries", "Attempts tried again, by error code.", labels=("reason",)
        )
        for reason in dict.fromkeys((*_RETRY_REASONS, *backend.num_retries)):
            retries.add_metric((reason,), backend.num_retries[reason])
        yield retries
        yield CounterMetricFamily(
            "tandem_requeues",
            "Requests that queued again, since a worker had no room after all.",
            value=backend.num_requeues,
        )
        yield CounterMetricFamily(
            "tandem_moves",
            "Requests that went on at another worker, since theirs turned or left.",
            value=backend.num_moves,
        )
        for name, words, value in (
            (
                "scheduler_reachable",
                "1 while the scheduler answers.",
                backend.scheduler.reachable,
            ),
            (
                "requests_waiting_for_placement",
                "Requests of this gateway in the queue.",
                backend.scheduler.num_waiting,
            ),
            (
                "placements_held",
                "Placements of this gateway that hold blocks.",
                backend.scheduler.num_placed,
            ),
        ):
            yield GaugeMetricFamily(f"tandem_{name}", words, value=float(value))
