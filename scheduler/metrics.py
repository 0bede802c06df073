"""What the scheduler tells Prometheus: the queue, the placements, the pools.

What workers and gateways count themselves is told by them alone: nothing is told twice.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.messages import WorkerRef, WorkerRole
from core.metrics.vllm import vllm_gauge, vllm_values
from scheduler.elastic import Split
from scheduler.front_desk import FrontDesk
from scheduler.policy import not_ready

_NO_WORKERS, _CAPACITY = "no_workers", "capacity"
# The label of what asked for a model that the scheduler does not know.
_NO_MODEL = ""
_ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE)
# There from the start, with zero.
_REJECTION_REASONS = ("overloaded", "deadline_exceeded", "unavailable")


class ClusterCollector(Collector):
    """Reads the desks at the time of the scrape; keeps nothing. Everything is told by model."""

    def __init__(
        self, desk: FrontDesk, configured: Mapping[str, tuple[int, int]], me: WorkerRef
    ) -> None:
        """`configured` says of each model how many prefill and decode workers there should be."""
        self._desk = desk
        self._configured = configured
        self._vllm = {name: vllm_values(me, name) for name in desk.desks}

    def collect(self) -> Iterator[Metric]:
        yield from self._queues()
        yield from self._pools()
        placements = CounterMetricFamily(
            "tandem_placements",
            "Placements made, by who reads the prompt.",
            labels=("model", "kind"),
        )
        rejections = CounterMetricFamily(
            "tandem_rejections",
            "Requests that left the queue, or never joined it, with an error, by its code.",
            labels=("model", "reason"),
        )
        placed = GaugeMetricFamily(
            "tandem_placed_requests", "Requests that hold a placement.", labels=("model",)
        )
        for model, desk in self._desk.desks.items():
            for kind, count in desk.num_placements.items():
                placements.add_metric((model, kind), count)
            for reason in dict.fromkeys((*_REJECTION_REASONS, *desk.num_rejections)):
                rejections.add_metric((model, reason), desk.num_rejections[reason])
            placed.add_metric((model,), len(desk.cluster.held))
        for reason, count in self._desk.num_rejections.items():
            rejections.add_metric((_NO_MODEL, reason), count)
        yield from (placements, rejections, placed)

    def _queues(self) -> Iterator[Metric]:
        """All of a model wait for the same: workers that can serve at all, or room on them."""
        queued = GaugeMetricFamily(
            "tandem_queued_requests",
            "Requests that wait, by what they wait for.",
            labels=("model", "reason"),
        )
        limit = GaugeMetricFamily(
            "tandem_queue_limit", "With so many waiting, one more is refused.", labels=("model",)
        )
        waiting = vllm_gauge("vllm:num_requests_waiting", "In the queue.")
        by_reason = vllm_gauge(
            "vllm:num_requests_waiting_by_reason", "In the queue: capacity.", "reason"
        )
        for model, desk in self._desk.desks.items():
            unable = not_ready(desk.cluster.view())
            blocked_by = _CAPACITY if unable is None else _NO_WORKERS
            for reason in (_CAPACITY, _NO_WORKERS):
                queued.add_metric((model, reason), desk.num_queued if reason == blocked_by else 0)
            limit.add_metric((model,), desk.max_queued)
            waiting.add_metric(self._vllm[model], desk.num_queued)
            by_reason.add_metric((*self._vllm[model], "capacity"), desk.num_queued)
        yield from (queued, limit, waiting, by_reason)

    def _pools(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "tandem_workers",
            "Registered workers, by whether they take work.",
            labels=("model", "role", "state"),
        )
        configured = GaugeMetricFamily(
            "tandem_workers_configured", "Workers that there should be.", labels=("model", "role")
        )
        turns = CounterMetricFamily(
            "tandem_role_flips",
            "Workers that turned, by the role they turned to.",
            labels=("model", "role"),
        )
        wanted = GaugeMetricFamily(
            "tandem_workers_wanted", "Workers that the demand could use.", labels=("model", "role")
        )
        load = GaugeMetricFamily(
            "tandem_role_load",
            "The demand, in workers that it would keep busy.",
            labels=("model", "role"),
        )
        able = GaugeMetricFamily(
            "tandem_cluster_ready", "1 while a request could be placed.", labels=("model",)
        )
        for model, desk in self._desk.desks.items():
            members = list(desk.cluster.members.values())
            prefill, decode = self._configured[model]
            expected = desk.roles.expected(Split(prefill=prefill, decode=decode))
            for role in _ROLES:
                mine = [each.load for each in members if each.hello.role is role]
                ready = sum(1 for each in mine if each is not None and not each.draining)
                name = role.name.lower()
                workers.add_metric((model, name, "ready"), ready)
                workers.add_metric((model, name, "not_ready"), len(mine) - ready)
                configured.add_metric((model, name), getattr(expected, name))
                turns.add_metric((model, name), desk.roles.num_turns[role])
                wanted.add_metric((model, name), getattr(desk.roles.wishes.wanted, name))
                if desk.roles.loads is not None:
                    load.add_metric((model, name), getattr(desk.roles.loads, name))
            able.add_metric((model,), float(not_ready(desk.cluster.view()) is None))
        yield from (workers, configured, turns, wanted, load, able)
        yield GaugeMetricFamily(
            "tandem_gateways", "Gateways that are connected.", value=len(self._desk.gateway_admins)
        )
