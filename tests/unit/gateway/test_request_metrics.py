"""What is measured of a request, from its arrival to its end, however it ends."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from core.config import ClusterConfig, TelemetryConfig
from core.errors import DataLoss, DeadlineExceeded, Overloaded, RateLimited, TandemError
from core.messages import StopReason, WorkerRef
from core.metrics.vllm import Labelled
from gateway.api import InferenceApi
from gateway.caller import Caller
from gateway.inputs import CompletionInput, SamplingInput
from gateway.ledger import Ledger
from gateway.outcome import OutcomeKind, answered, outcome_of
from gateway.request_metrics import RequestMetrics
from gateway.request_record import RequestRecord, begin

MODEL = "demo-model"
VLLM = {"engine": "0", "model_name": MODEL}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metered(card, tokenizer, backend, registry: CollectorRegistry) -> Iterator[InferenceApi]:
    vllm = Labelled(registry, WorkerRef(name="gateway", incarnation="1"), MODEL)
    metrics = RequestMetrics(vllm, window=8192, objectives=TelemetryConfig(slo_ttft_s=30.0))
    api = InferenceApi.of_one(
        card, MODEL, ClusterConfig(), backend, tokenizer=tokenizer, metrics=metrics
    )
    yield api
    api.close()


def _asked(**fields: object) -> CompletionInput:
    return CompletionInput(
        model=str(fields.pop("model", MODEL)), prompt="Hello", sampling=SamplingInput(**fields)
    )


async def _answer(api: InferenceApi, request: CompletionInput, *, most: int = 1000) -> None:
    async with api.complete(request, ledger=Ledger()) as text:
        async for _ in text:
            most -= 1
            if not most:
                return


def _requests(
    registry: CollectorRegistry, outcome: str, reason: str, model: str = MODEL
) -> float | None:
    labels = {
        "model": model,
        "operation": "text_completion",
        "outcome": outcome,
        "reason": reason,
    }
    return registry.get_sample_value("tandem_requests_total", labels)


async def test_an_answer_is_counted_once_and_its_tokens_one_by_one(metered, registry, backend):
    backend.say_ids([5, 6, 7, 8], 1, StopReason.LENGTH)
    await _answer(metered, _asked(max_tokens=4))
    assert _requests(registry, "answered", "length") == 1
    value = registry.get_sample_value
    assert value("vllm:generation_tokens_total", VLLM) == 4
    assert value("vllm:inter_token_latency_seconds_count", VLLM) == 3
    assert value("vllm:time_to_first_token_seconds_count", VLLM) == 1
    assert value("vllm:prompt_tokens_cached_total", VLLM) == 3
    assert value("vllm:request_success_total", {**VLLM, "finished_reason": "length"}) == 1
    assert value("vllm:request_queue_time_seconds_sum", VLLM) == 0.5
    assert value("tandem_stage_seconds_sum", {"model": MODEL, "stage": "prefill_compute"}) == 0.02
    assert value("tandem_requests_in_flight", {"model": MODEL}) == 0
    genai = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "tandem",
        "gen_ai_request_model": MODEL,
        "gen_ai_response_model": MODEL,
    }
    assert value("gen_ai_server_time_to_first_token_seconds_count", genai) == 1
    assert value("gen_ai_server_time_per_output_token_seconds_count", genai) == 1
    duration = "gen_ai_server_request_duration_seconds_count"
    assert value(duration, {**genai, "error_type": ""}) == 1


async def test_tokens_that_came_together_have_a_latency_each(metered, registry, backend):
    backend.say_ids([5, 6, 7, 8, 9], 2, StopReason.LENGTH)
    await _answer(metered, _asked(max_tokens=5))
    assert registry.get_sample_value("vllm:inter_token_latency_seconds_count", VLLM) == 3


async def test_a_stop_string_is_a_stop(metered, registry, backend):
    await _answer(metered, _asked(stop=("capital",)))
    assert _requests(registry, "answered", "stop_sequence") == 1
    stopped = {**VLLM, "finished_reason": "stop"}
    assert registry.get_sample_value("vllm:request_success_total", stopped) == 1


async def test_every_answer_of_several_has_to_end(metered, registry):
    await _answer(metered, _asked(n=2))
    assert _requests(registry, "answered", "eos") == 1
    assert registry.get_sample_value("vllm:request_params_n_sum", VLLM) == 2


async def test_a_request_that_is_refused_before_the_queue_counts_too(metered, registry):
    with pytest.raises(TandemError):
        await _answer(metered, _asked(model="another"))
    assert _requests(registry, "refused", "model_not_found", model="") == 1
    assert registry.get_sample_value("tandem_slo_requests_total", {"model": MODEL}) == 0


async def test_what_clients_invent_makes_no_series(metered, registry):
    """Names of models, tenants, ids and paths stand in logs and traces, and in no label."""

    async def ask(i: int) -> None:
        tenant = Caller(tenant=f"tenant-{i}", key_id=f"key-{i}")
        begin(RequestRecord(path=f"/files/{i}.php", request_id=f"id-{i}", caller=tenant))
        with contextlib.suppress(TandemError):
            await _answer(metered, _asked(model=f"model-{i}" if i % 2 else MODEL, max_tokens=1))

    def series() -> int:
        return sum(len(family.samples) for family in registry.collect())

    for i in range(4):
        await ask(i)
    before = series()
    for i in range(4, 300):
        await ask(i)
    assert series() == before
    text = generate_latest(registry).decode()
    assert len(text) < 2**20
    assert not any(name in text for name in ("tenant-", "model-2", "model-3", "id-", ".php"))


async def test_a_client_that_leaves_is_no_failure(metered, registry):
    await _answer(metered, _asked(), most=1)
    assert _requests(registry, "cancelled", "cancelled") == 1
    assert registry.get_sample_value("tandem_slo_requests_total", {"model": MODEL}) == 0


async def test_a_failure_of_ours_misses_every_objective(metered, registry, backend):
    backend.refusal = Overloaded("full")
    with pytest.raises(Overloaded):
        await _answer(metered, _asked())
    assert _requests(registry, "failed", "overloaded") == 1
    assert registry.get_sample_value("tandem_slo_requests_total", {"model": MODEL}) == 1
    both = {"model": MODEL, "objective": "both"}
    assert registry.get_sample_value("tandem_slo_good_requests_total", both) == 0


async def test_a_good_answer_is_within_both_objectives(metered, registry):
    await _answer(metered, _asked())
    for objective in ("ttft", "tpot", "both"):
        good = {"model": MODEL, "objective": objective}
        assert registry.get_sample_value("tandem_slo_good_requests_total", good) == 1
    assert registry.get_sample_value("tandem_slo_requests_total", {"model": MODEL}) == 1


@pytest.mark.parametrize(
    ("error", "kind", "ours"),
    [
        (asyncio.CancelledError(), OutcomeKind.CANCELLED, False),
        (RateLimited("enough"), OutcomeKind.REFUSED, False),
        (DeadlineExceeded("late"), OutcomeKind.TIMEOUT, True),
        (DataLoss("damaged"), OutcomeKind.FAILED, True),
        (ValueError("a prompt"), OutcomeKind.FAILED, True),
    ],
)
def test_an_error_tells_whose_doing_it_was(error: BaseException, kind: OutcomeKind, ours: bool):
    outcome = outcome_of(error, own_deadline=False)
    assert (outcome.kind, outcome.is_servers_fault) == (kind, ours)


def test_a_deadline_of_the_clients_own_is_not_our_failure():
    assert not outcome_of(DeadlineExceeded("late"), own_deadline=True).is_servers_fault
    assert answered(StopReason.EOS).reason == "eos"
