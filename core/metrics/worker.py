"""What a prefill or decode worker tells: its desk's state at the scrape, and what it measured."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.messages import WorkerLoad, WorkerRole
from core.metrics import buckets
from core.metrics.counts import families
from core.metrics.vllm import Labelled


class WorkerState(Protocol):
    """What is read of a desk at each scrape."""

    def load(self) -> WorkerLoad: ...

    def leases(self) -> Mapping[str, int]:
        """Hand-offs and answers that hold blocks, by the state of their machine."""
        ...

    @property
    def stalled_s(self) -> float:
        """For how long the step loop has had something to do and has not come round."""
        ...


class WorkerMetrics:
    """The histograms of one worker, filled as things happen. A call costs a few microseconds."""

    def __init__(self, registry: CollectorRegistry, vllm: Labelled) -> None:
        self._step_s = Histogram(
            "tandem_step_seconds",
            "Time of one engine step on the compute thread, by what it held.",
            ("kind",),
            buckets=buckets.STEP_S,
            registry=registry,
        )
        self._by_kind = {kind: self._step_s.labels(kind) for kind in ("prefill", "decode", "mixed")}
        self._step_tokens = vllm.histogram(
            "vllm:iteration_tokens_total",
            "Tokens of one engine step.",
            buckets.VLLM_STEP_TOKENS,
        )
        self._transfer_s = Histogram(
            "tandem_kv_transfer_seconds",
            "Time that the sender spent writing one prompt's KV blocks.",
            ("transport",),
            buckets=buckets.TRANSFER_S,
            registry=registry,
        )
        self._transfer_bytes = Histogram(
            "tandem_kv_transfer_bytes",
            "Bytes of one prompt's KV blocks.",
            ("transport",),
            buckets=buckets.TRANSFER_BYTES,
            registry=registry,
        )
        self._transfer_speed = Histogram(
            "tandem_kv_transfer_gigabytes_per_second",
            "Speed of one prompt's transfer while it was being written, in 10^9 bytes per second.",
            ("transport",),
            buckets=buckets.TRANSFER_GB_PER_S,
            registry=registry,
        )

    def stepped(self, num_decodes: int, num_prompt_tokens: int, compute_s: float) -> None:
        """One step is over."""
        kind = "mixed" if num_decodes and num_prompt_tokens else "decode"
        self._by_kind[kind if num_decodes else "prefill"].observe(compute_s)
        self._step_tokens.observe(num_decodes + num_prompt_tokens)

    def transferred(self, transport: str, num_bytes: int, busy_s: float) -> None:
        """The sender has written all of one prompt's blocks; not where there were none."""
        if num_bytes:
            self._transfer_s.labels(transport).observe(busy_s)
            self._transfer_bytes.labels(transport).observe(num_bytes)
            self._transfer_speed.labels(transport).observe(num_bytes / max(busy_s, 1e-9) / 1e9)


class WorkerCollector(Collector):
    """Reads the desk at the time of the scrape; keeps nothing."""

    def __init__(
        self,
        state: WorkerState,
        role: Callable[[], WorkerRole],
        *,
        num_blocks: int,
        block_size: int,
        vllm: Labelled,
    ) -> None:
        self._state = state
        self._role = role
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        load = self._state.load()
        yield from self._blocks(load)
        yield from self._sequences(load)
        counts = {counter.name: counter.value for counter in load.counters}
        yield from families(counts)
        yield from self._as_vllm(load, counts)

    def _blocks(self, load: WorkerLoad) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "tandem_kv_blocks", "KV blocks by state; they sum to the pool.", labels=("state",)
        )
        for state, count in asdict(load.blocks).items():
            blocks.add_metric((state,), count)
        yield blocks
        yield GaugeMetricFamily(
            "tandem_kv_pool_blocks", "KV blocks of the pool.", value=self._num_blocks
        )

    def _sequences(self, load: WorkerLoad) -> Iterator[Metric]:
        sequences = GaugeMetricFamily(
            "tandem_sequences",
            "Sequences: running, waiting for their first step or KV, or preempted.",
            labels=("state",),
        )
        for state, count in (
            ("running", load.num_running),
            ("waiting", load.num_waiting),
            ("preempted", load.num_preempted),
        ):
            sequences.add_metric((state,), count)
        yield sequences
        leases = GaugeMetricFamily(
            "tandem_leases", "Requests that hold blocks, by hand-off state.", labels=("state",)
        )
        for state, count in self._state.leases().items():
            leases.add_metric((state,), count)
        yield leases
        for name, words, value in (
            ("backlog_tokens", "Prompt tokens that are still to be computed.", load.backlog_tokens),
            (
                "prefill_tokens_per_second",
                "Measured speed of reading prompts, beside what runs now.",
                load.prefill_tokens_per_s,
            ),
            ("draining", "1 while no new work is taken.", float(load.draining)),
            (
                "step_stalled_seconds",
                "How long the step loop has had work and has not come round.",
                self._state.stalled_s,
            ),
        ):
            yield GaugeMetricFamily(f"tandem_{name}", words, value=value)

    def _as_vllm(self, load: WorkerLoad, counts: Mapping[str, int]) -> Iterator[Metric]:
        used = 1 - (load.blocks.free + load.blocks.cached) / max(1, self._num_blocks)
        gauge, counter = self._vllm.gauge_family, self._vllm.counter_family
        yield gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", used)
        # Each request once in the whole cluster: its prefill worker does not count it.
        if self._role() is WorkerRole.DECODE:
            words = "Sequences that are being decoded here."
            yield gauge("vllm:num_requests_running", words, load.num_running)
            waiting = load.num_waiting + load.num_preempted
            yield gauge("vllm:num_requests_waiting", "Placed here, and not running.", waiting)
            reasons = self._vllm.gauge_family(
                "vllm:num_requests_waiting_by_reason",
                "Waiting for KV blocks (capacity), or for the prompt's KV (deferred).",
                None,
                "reason",
            )
            for reason, count in (
                ("capacity", load.num_preempted),
                ("deferred", load.num_waiting),
            ):
                reasons.add_metric((*self._vllm.values, reason), count)
            yield reasons
        for name, words, key in (
            ("num_preemptions", "Sequences that lost their blocks to others.", "preemptions"),
            ("prefix_cache_queries", "Prompt tokens looked up here.", "prefix_cache_queries"),
            ("prefix_cache_hits", "Of those, tokens whose KV was here.", "prefix_cache_hits"),
        ):
            yield counter(f"vllm:{name}", words, counts.get(key, 0))
        info = self._vllm.gauge_family(
            "vllm:cache_config_info", "The KV pool.", None, "block_size", "num_gpu_blocks"
        )
        info.add_metric((*self._vllm.values, str(self._block_size), str(self._num_blocks)), 1)
        yield info
