"""Which requests are recorded and which are told of, from their start or in hindsight."""

import pytest

from core.config import TelemetryConfig
from core.telemetry.context import TraceContext
from core.telemetry.exporter import SpanExporter
from core.telemetry.names import Kept
from core.telemetry.span import MAX_EVENTS, NO_SPAN
from core.telemetry.tracer import NO_TRACER, Tracer

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-1] + "0"


class Told(SpanExporter):
    """Keeps what is offered."""

    def __init__(self) -> None:
        self.traces = []

    def offer(self, trace):
        self.traces.append(trace)

    def counters(self):
        return {}

    def close(self):
        pass


@pytest.fixture
def told():
    return Told()


def tracer(told, **settings):
    return Tracer(TelemetryConfig(**settings), told)


def spans(told):
    return {span.name: span for trace in told.traces for span in trace.spans}


def test_the_spans_of_a_request_hang_under_its_server_span_and_that_under_its_caller(told):
    trace = tracer(told).request(SAMPLED)
    trace.serve("chat m", 1.0)
    attempt = trace.begin("attempt", 2.0)
    trace.begin("inner", 2.5, parent=attempt).end(2.75)
    trace.add("render", 1.25, 1.5, {"a": 1, "b": None})
    trace.finish(9.0)
    found = spans(told)
    assert found["chat m"].parent_id.hex() == "b7ad6b7169203331"
    assert found["attempt"].parent_id == found["render"].parent_id == found["chat m"].span_id
    assert found["inner"].parent_id == attempt.span_id
    assert found["render"].attributes == {"a": 1}
    assert (found["attempt"].end_s, found["inner"].end_s) == (9.0, 2.75)
    assert found["chat m"].is_server and not found["attempt"].is_server


def test_work_sent_to_another_process_hangs_under_the_span_that_sent_it(told):
    trace = tracer(told).request(None)
    trace.serve("chat m", 1.0)
    attempt = trace.begin("attempt", 2.0)
    work = tracer(told).work("job", trace.header(attempt))
    work.add("queue", 3.0, 4.0)
    work.finish(4.0)
    assert spans(told)["queue"].parent_id == attempt.span_id
    assert work.trace_id == trace.trace_id


def test_the_callers_decision_wins_over_the_share(told):
    none, every = tracer(told, sample_ratio=0.0), tracer(told, sample_ratio=1.0)
    assert none.request(SAMPLED).sampled
    assert not every.request(UNSAMPLED).sampled
    assert every.request(None).sampled
    assert not none.request(None).sampled


def test_about_the_share_is_sampled(told):
    half = tracer(told, sample_ratio=0.5)
    sampled = sum(half.request(None).sampled for _ in range(2000))
    assert 850 < sampled < 1150


def test_what_was_not_sampled_is_told_of_where_the_gateway_keeps_it(told):
    there, here = tracer(told, sample_ratio=0.0), tracer(told, sample_ratio=0.0)
    trace = here.request(None)
    trace.serve("chat m", 1.0)
    trace.on_keep(lambda: there.keep("job"))
    done, going = there.work("job", trace.header()), there.work("job", trace.header())
    done.add("queue", 2.0, 3.0)
    done.finish(3.0)
    going.begin("decode", 3.0)
    assert told.traces == []
    trace.keep()
    trace.finish(5.0)
    assert set(spans(told)) == {"queue", "chat m"}
    going.finish(6.0)
    assert set(spans(told)) == {"queue", "chat m", "decode"}


def test_an_attempt_after_the_decision_to_keep_is_told_of_at_once(told):
    trace = tracer(told, sample_ratio=0.0).request(None)
    trace.serve("chat m", 1.0)
    trace.keep()
    assert TraceContext.parse(trace.header()).sampled


def test_what_nobody_keeps_is_forgotten_the_oldest_first(told):
    there = tracer(told, sample_ratio=0.0, tail_requests=2)
    for key in ("a", "b", "c"):
        work = there.work(key, UNSAMPLED)
        work.add(key, 1.0, 2.0)
        work.finish(2.0)
    for key in ("a", "b", "c", "unknown"):
        there.keep(key)
    assert set(spans(told)) == {"b", "c"}
    assert there.num_forgotten == 1


def test_without_tails_nothing_is_recorded_that_is_not_sampled(told):
    quiet = tracer(told, sample_ratio=0.0, keep_errors=False, keep_slo_misses=False)
    trace = quiet.request(UNSAMPLED)
    assert trace.serve("chat m", 1.0) is NO_SPAN
    assert trace.header() == UNSAMPLED and trace.trace_id is not None
    assert quiet.work("job", trace.header()).begin("decode", 2.0) is NO_SPAN
    assert quiet.request(None).header() == ""


def test_without_a_collector_a_callers_trace_is_still_known_to_the_logs():
    assert NO_TRACER.request(SAMPLED).trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert NO_TRACER.request(None).trace_id is None
    assert not NO_TRACER.work("job", SAMPLED).recording


@pytest.mark.parametrize(
    "failed, ttft_s, tpot_s, why",
    [
        (False, 1.9, 0.09, None),
        (True, 1.9, 0.09, Kept.ERROR),
        (False, 2.1, None, Kept.SLO_TTFT),
        (False, 0.1, 0.2, Kept.SLO_TPOT),
        (False, None, None, None),
    ],
)
def test_failures_and_missed_targets_are_kept(told, failed, ttft_s, tpot_s, why):
    def reason(**settings):
        return tracer(told, **settings).reason_to_keep(failed=failed, ttft_s=ttft_s, tpot_s=tpot_s)

    assert reason(slo_ttft_s=2.0, slo_tpot_s=0.1) == why
    assert reason(keep_errors=False, keep_slo_misses=False) is None


def test_a_step_is_linked_to_the_spans_that_it_worked_for_and_no_child_of_them(told):
    here = tracer(told)
    trace = here.request(SAMPLED)
    decode = trace.begin("decode", 1.0)
    here.step(2.0, 3.0, [(trace, decode)], sequences=3, number=7)
    step = spans(told)["step"]
    assert step.links == [(trace.context.trace_id, decode.span_id)]
    assert step.parent_id == b""
    assert told.traces[0].context.trace_id != trace.context.trace_id


def test_a_span_has_bounded_events_and_counts_the_others(told):
    span = tracer(told).request(SAMPLED).begin("decode", 1.0)
    for i in range(MAX_EVENTS + 3):
        span.event("tokens", 2.0, {"n": i})
    assert (len(span.events), span.num_dropped_events) == (MAX_EVENTS, 3)
