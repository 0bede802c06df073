"""What a scheduler tells of its leadership."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.election import Election


class LeaderCollector(Collector):
    """Reads the election at the time of the scrape."""

    def __init__(self, election: Election) -> None:
        self._election = election

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "tandem_scheduler_leads",
            "1 while this scheduler leads.",
            value=float(self._election.leads),
        )
        yield GaugeMetricFamily(
            "tandem_leader_token",
            "Under which this scheduler leads; 0 while it stands by.",
            value=self._election.token,
        )
        yield CounterMetricFamily(
            "tandem_leader_terms",
            "How often this scheduler began to lead, or got another token.",
            value=self._election.num_terms,
        )
