"""A request's SERVER span: what it says, and whether the request is kept in hindsight."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from core.messages import StopReason
from core.telemetry.names import PROVIDER, Attr, Operation
from core.telemetry.span import Value
from core.telemetry.tracer import Tracer
from gateway.inputs import SamplingInput
from gateway.outcome import outcome_of
from gateway.request_record import RequestRecord

HTTP_OPERATIONS = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/completions": Operation.TEXT_COMPLETION,
}
GRPC_OPERATIONS = {
    "/tandem.v1.InferenceService/Chat": Operation.CHAT,
    "/tandem.v1.InferenceService/Generate": Operation.TEXT_COMPLETION,
    "/vllm.grpc.engine.VllmEngine/Generate": Operation.TEXT_COMPLETION,
}


def begin(
    tracer: Tracer,
    record: RequestRecord,
    operation: Operation,
    traceparent: str | None,
    attributes: dict[str, Value],
) -> None:
    """The request has come, from a caller with this traceparent."""
    record.operation = operation
    trace = record.trace = tracer.request(traceparent)
    if trace.recording:
        span = trace.serve(operation, record.started_s)
        span.set(attributes)
        span.set({Attr.OPERATION: operation, Attr.PROVIDER: PROVIDER})


def describe(record: RequestRecord, asked_of: str, model: str, asked: SamplingInput) -> None:
    """It is valid, and this is what is asked of which model, by which of its names."""
    record.num_choices = asked.n or 1
    if not record.trace.recording:
        return
    span = record.trace.root
    span.name = f"{record.operation} {model}"
    span.set(
        {
            Attr.REQUEST_ID: record.job,
            Attr.RESPONSE_ID: record.job,
            Attr.REQUEST_MODEL: asked_of,
            Attr.RESPONSE_MODEL: model,
            Attr.REQUEST_MAX_TOKENS: asked.max_tokens,
            Attr.REQUEST_TEMPERATURE: asked.temperature,
            Attr.REQUEST_TOP_P: asked.top_p,
            Attr.REQUEST_TOP_K: asked.top_k,
            Attr.REQUEST_CHOICES: asked.n if asked.n != 1 else None,
            Attr.TENANT: record.caller.tenant or None,
        }
    )


@contextmanager
def blamed(record: RequestRecord) -> Iterator[None]:
    """What fails inside by our own doing fails the SERVER span; a client's mistake does not."""
    try:
        yield
    except Exception as error:
        outcome = outcome_of(error, own_deadline=record.own_deadline)
        if outcome.is_servers_fault:
            record.trace.root.fail(outcome.reason)
        raise


def account(record: RequestRecord, cached_tokens: int, ends: list[StopReason]) -> None:
    """What came of it, as far as it came."""
    record.cached_tokens = cached_tokens
    record.finish_reasons = tuple(end.name.lower() for end in ends)
    if record.trace.recording:
        record.trace.root.set(
            {
                Attr.INPUT_TOKENS: record.prompt_tokens,
                Attr.CACHED_TOKENS: cached_tokens,
                Attr.OUTPUT_TOKENS: record.completion_tokens,
                Attr.RESPONSE_TTFT: record.ttft_s,
                Attr.RESPONSE_FINISH_REASONS: record.finish_reasons,
            }
        )


def end(
    tracer: Tracer, record: RequestRecord, attributes: dict[str, Value], *, fault: str | None
) -> None:
    """The client has its answer, or has left. `fault` says what of ours went wrong, if anything."""
    trace = record.trace
    if not trace.recording:
        return
    now_s = time.monotonic()
    trace.root.set(attributes)
    if fault is not None:
        trace.root.fail(fault)
    if not trace.sampled:
        later_tokens = (record.completion_tokens or 0) / record.num_choices - 1
        decode_s = now_s - record.started_s - (record.ttft_s or 0.0)
        kept = tracer.reason_to_keep(
            failed=trace.root.error is not None,
            ttft_s=record.ttft_s,
            tpot_s=decode_s / later_tokens if later_tokens > 0 else None,
        )
        if kept is not None:
            trace.root.set({Attr.KEPT: kept})
            trace.keep()
    trace.finish(now_s)
