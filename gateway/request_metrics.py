"""What the gateway measures of requests: how long, how many, how they ended, and how well.

Labels are few and bounded: the model that is served, the operation, an outcome and a reason out of
`core.errors` or `StopReason`. Never an id, a tenant or a path.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.config import TelemetryConfig
from core.messages import StopReason, WorkerRef
from core.metrics import buckets
from core.metrics.vllm import Labelled
from gateway.ledger import Timing
from gateway.outcome import Outcome, OutcomeKind

_PROVIDER = "tandem"
# The label of what asked for a model that is not served.
_NO_MODEL = ""
_GENAI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
# vLLM's words for how an answer ended.
_FINISHED_REASON = {
    OutcomeKind.CANCELLED: "abort",
    OutcomeKind.TIMEOUT: "abort",
    OutcomeKind.FAILED: "error",
}
# Sums of the others.
_TOTALS = frozenset({"ttft_s", "total_s"})


class RequestMetrics:
    """The instruments of one model. `gateway.request_watch` fills them, one watch a request.

    Several models have one set of them together, told apart by a label; `window` is the longest.
    """

    def __init__(self, vllm: Labelled, *, window: int, objectives: TelemetryConfig) -> None:
        self._model = vllm.model
        self._labelled = vllm
        self._window = window
        self._objectives = objectives
        self._genai(vllm)
        self._tandem(vllm)
        self._vllm(vllm, buckets.token_counts(window))

    @property
    def model(self) -> str:
        """Whose they are."""
        return self._model

    @cached_property
    def of_unknown(self) -> "RequestMetrics":
        """Those of requests for models that are not served, without a model's name."""
        vllm = self._labelled.of(_NO_MODEL)
        return RequestMetrics(vllm, window=self._window, objectives=self._objectives)

    def _genai(self, vllm: Labelled) -> None:
        def histogram(name: str, words: str, bounds: Sequence[float], *labels: str) -> Histogram:
            names = (*_GENAI_LABELS, *labels)
            return vllm.once(
                name, lambda: Histogram(name, words, names, buckets=bounds, registry=vllm.registry)
            )

        self._duration_s = histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a request's arrival to the last of its answer.",
            buckets.GENAI_DURATION_S,
            "error_type",
        )
        self._ttft_s = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to the first token of answers that were finished.",
            buckets.GENAI_TTFT_S,
        )
        self._tpot_s = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between tokens behind the first, of answers that were finished.",
            buckets.GENAI_TPOT_S,
        )

    def _tandem(self, vllm: Labelled) -> None:
        def counter(name: str, words: str, *labels: str) -> Counter:
            names = ("model", *labels)
            return vllm.once(name, lambda: Counter(name, words, names, registry=vllm.registry))

        self.in_flight = vllm.once(
            "in_flight",
            lambda: Gauge(
                "tandem_requests_in_flight",
                "Requests that wait or run.",
                ("model",),
                registry=vllm.registry,
            ),
        ).labels(self._model)
        self._requests = counter(
            "tandem_requests",
            "Requests by how they ended: the stop reason of an answer, or an error code.",
            "operation",
            "outcome",
            "reason",
        )
        stage_s = vllm.once(
            "stage_s",
            lambda: Histogram(
                "tandem_stage_seconds",
                "Where the time to the first token went, by stage.",
                ("model", "stage"),
                buckets=buckets.STAGE_S,
                registry=vllm.registry,
            ),
        )
        self._stages = {
            name: stage_s.labels(self._model, name.removesuffix("_s"))
            for name in asdict(Timing())
            if name not in _TOTALS
        }
        self._judged = counter(
            "tandem_slo_requests",
            "Requests that count for the objectives: answered, or failed by the server.",
        ).labels(self._model)
        good = counter(
            "tandem_slo_good_requests",
            "Of those, the ones within an objective; goodput is the rate within both.",
            "objective",
        )
        self._good = {name: good.labels(self._model, name) for name in ("ttft", "tpot", "both")}
        objective_s = vllm.once(
            "objective_s",
            lambda: Gauge(
                "tandem_slo_seconds", "The objectives.", ("objective",), registry=vllm.registry
            ),
        )
        objective_s.labels("ttft").set(self._objectives.slo_ttft_s)
        objective_s.labels("tpot").set(self._objectives.slo_tpot_s)

    def _vllm(self, vllm: Labelled, lengths: tuple[int, ...]) -> None:
        self.inter_token_s = vllm.loop_histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens.", buckets.VLLM_TPOT_S
        )
        self._vllm_s = {
            key: vllm.histogram(f"vllm:{name}_seconds", words, bounds)
            for key, name, words, bounds in (
                ("ttft", "time_to_first_token", "Time to first token.", buckets.VLLM_TTFT_S),
                (
                    "tpot",
                    "request_time_per_output_token",
                    "Mean time per token of a request.",
                    buckets.VLLM_TPOT_S,
                ),
                ("e2e", "e2e_request_latency", "Whole time.", buckets.VLLM_REQUEST_S),
                ("queue", "request_queue_time", "Time in the queue.", buckets.VLLM_REQUEST_S),
                (
                    "prefill",
                    "request_prefill_time",
                    "Time from the placement to the first token.",
                    buckets.VLLM_REQUEST_S,
                ),
                (
                    "decode",
                    "request_decode_time",
                    "Time from the first token to the last.",
                    buckets.VLLM_REQUEST_S,
                ),
                (
                    "inference",
                    "request_inference_time",
                    "Time from the placement to the last token.",
                    buckets.VLLM_REQUEST_S,
                ),
            )
        }
        self._lengths = {
            key: vllm.histogram(f"vllm:{key}", words, bounds)
            for key, words, bounds in (
                ("request_prompt_tokens", "Tokens of a prompt.", lengths),
                ("request_generation_tokens", "Tokens of an answer.", lengths),
                ("request_params_max_tokens", "The most tokens that were asked for.", lengths),
                ("request_params_n", "Answers that were asked for.", buckets.VLLM_CHOICES),
            )
        }
        self.prompt_tokens = vllm.counter("vllm:prompt_tokens", "Tokens of prompts answered to.")
        self.cached_tokens = vllm.counter(
            "vllm:prompt_tokens_cached", "Of those, tokens whose KV was in a prefix cache."
        )
        self.generation_tokens = vllm.counter("vllm:generation_tokens", "Tokens of answers.")
        finished = vllm.counter(
            "vllm:request_success", "Requests by how they finished.", "finished_reason"
        )
        self._finished = {
            reason: finished.labels(*vllm.values, reason)
            for reason in ("stop", "length", "abort", "error")
        }

    def asked(self, num_prompt_tokens: int, max_new_tokens: int, num_choices: int) -> None:
        """A request was found valid and is about to be queued."""
        self._lengths["request_prompt_tokens"].observe(num_prompt_tokens)
        self._lengths["request_params_max_tokens"].observe(max_new_tokens)
        self._lengths["request_params_n"].observe(num_choices)

    def ended(
        self,
        operation: str,
        outcome: Outcome,
        timing: Timing,
        *,
        duration_s: float,
        num_tokens: int,
        num_choices: int,
    ) -> None:
        """A request is over. `num_tokens` are those of all its answers."""
        self._requests.labels(self._model, operation, outcome.kind, outcome.reason).inc()
        genai = (operation, _PROVIDER, self._model, self._model)
        answered = outcome.kind is OutcomeKind.ANSWERED
        self._duration_s.labels(*genai, "" if answered else outcome.reason).observe(duration_s)
        decode_s = max(0.0, duration_s - timing.ttft_s)
        later_tokens = num_tokens / max(1, num_choices) - 1
        tpot_s = decode_s / later_tokens if later_tokens > 0 else None
        if timing.ttft_s:
            for name, stage in self._stages.items():
                stage.observe(getattr(timing, name))
        if answered:
            self._ttft_s.labels(*genai).observe(timing.ttft_s)
            if tpot_s is not None:
                self._tpot_s.labels(*genai).observe(tpot_s)
            self._answered_as_vllm(timing, duration_s, tpot_s, num_tokens)
        self._finish_as_vllm(outcome)
        if answered or outcome.is_servers_fault:
            self._judge(timing.ttft_s, tpot_s, answered=answered)

    def _judge(self, ttft_s: float, tpot_s: float | None, *, answered: bool) -> None:
        """One token alone has no time per token, and so is within its objective."""
        self._judged.inc()
        first = answered and ttft_s <= self._objectives.slo_ttft_s
        others = answered and (tpot_s or 0.0) <= self._objectives.slo_tpot_s
        for name, good in (("ttft", first), ("tpot", others), ("both", first and others)):
            if good:
                self._good[name].inc()

    def _answered_as_vllm(
        self, timing: Timing, duration_s: float, tpot_s: float | None, num_tokens: int
    ) -> None:
        waited_s = timing.validate_s + timing.render_s + timing.tokenise_s + timing.queue_s
        seconds = self._vllm_s
        seconds["ttft"].observe(timing.ttft_s)
        seconds["e2e"].observe(duration_s)
        seconds["queue"].observe(timing.queue_s)
        seconds["prefill"].observe(max(0.0, timing.ttft_s - waited_s))
        seconds["decode"].observe(max(0.0, duration_s - timing.ttft_s))
        seconds["inference"].observe(max(0.0, duration_s - waited_s))
        if tpot_s is not None:
            seconds["tpot"].observe(tpot_s)
        self._lengths["request_generation_tokens"].observe(num_tokens)

    def _finish_as_vllm(self, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.ANSWERED:
            length = outcome.reason == StopReason.LENGTH.name.lower()
            self._finished["length" if length else "stop"].inc()
        elif (reason := _FINISHED_REASON.get(outcome.kind)) is not None:
            self._finished[reason].inc()


def unread_metrics(model: str, objectives: TelemetryConfig) -> RequestMetrics:
    """Metrics of a registry of their own, for a gateway without an admin server."""
    vllm = Labelled(CollectorRegistry(), WorkerRef(name="gateway", incarnation=""), model)
    return RequestMetrics(vllm, window=1, objectives=objectives)
