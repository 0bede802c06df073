"""The stages of a request, as operators see them: in order, each in its process."""

from core.messages import Endpoint, HandoffTiming, Placement, TransferId, WorkerRef
from gateway.waterfall import MAX_STAGES, Waterfall

HANDOFF = HandoffTiming(
    grant_s=0.25, prefill_wait_s=0.5, prefill_compute_s=1.0, transfer_tail_s=0.25, adopt_s=0.125
)


def endpoint(name):
    return Endpoint(worker=WorkerRef(name=name, incarnation="i"), address="unix:/x")


def placement(queue_s, *, prefill="prefill-0"):
    return Placement(
        transfer=TransferId(request_id="r", attempt=1),
        prefill=endpoint(prefill) if prefill is not None else None,
        decode=endpoint("decode-0"),
        ticket=b"",
        queue_s=queue_s,
    )


def told(waterfall):
    return [
        (stage.name, stage.process, stage.start_s, stage.end_s, stage.attempt, stage.error)
        for stage in waterfall.stages
    ]


def test_a_request_that_is_handed_over_has_each_stage_in_its_process():
    waterfall = Waterfall()
    waterfall.add("validate", 9.0, 10.0)
    waterfall.begin(1, 10.0)
    waterfall.placed(placement(2.0), 12.5)
    waterfall.arrived(HANDOFF, 16.0)
    waterfall.add("flush", 16.0, 16.5)
    waterfall.end(20.0)
    waterfall.end(21.0)
    assert told(waterfall) == [
        ("validate", "gateway", 9.0, 10.0, 0, None),
        ("queue", "scheduler", 10.0, 12.0, 1, None),
        ("grant", "decode-0", 13.875, 14.125, 1, None),
        ("prefill_wait", "prefill-0", 14.125, 14.625, 1, None),
        ("prefill", "prefill-0", 14.625, 15.625, 1, None),
        ("transfer_tail", "decode-0", 15.625, 15.875, 1, None),
        ("adopt", "decode-0", 15.875, 16.0, 1, None),
        ("flush", "gateway", 16.0, 16.5, 0, None),
        ("decode", "decode-0", 16.0, 20.0, 1, None),
    ]


def test_a_prompt_read_by_the_decode_worker_is_read_there():
    waterfall = Waterfall()
    waterfall.begin(1, 10.0)
    waterfall.placed(placement(0.0, prefill=None), 10.0)
    waterfall.arrived(HandoffTiming(prefill_compute_s=1.0), 11.0)
    waterfall.end(12.0)
    assert [stage.process for stage in waterfall.stages] == ["scheduler", "decode-0", "decode-0"]


def test_attempts_that_failed_say_so_where_they_failed():
    waterfall = Waterfall()
    waterfall.begin(1, 10.0)
    waterfall.placed(placement(1.0), 11.0)
    waterfall.end(12.0, "worker_lost")
    waterfall.begin(2, 12.0)
    waterfall.placed(placement(1.0), 13.0)
    waterfall.arrived(HANDOFF, 16.0)
    waterfall.end(17.0, "worker_lost")
    waterfall.begin(3, 17.0)
    waterfall.end(18.0, "unavailable")
    failed = [stage for stage in waterfall.stages if stage.error is not None]
    assert [(stage.name, stage.attempt, stage.start_s, stage.end_s) for stage in failed] == [
        ("attempt", 1, 11.0, 12.0),
        ("decode", 2, 16.0, 17.0),
        ("queue", 3, 17.0, 18.0),
    ]


def test_parts_that_do_not_fit_are_cut_and_not_drawn_before_their_time():
    waterfall = Waterfall()
    waterfall.begin(1, 10.0)
    waterfall.placed(placement(1.0), 11.0)
    waterfall.arrived(HANDOFF, 11.5)
    assert all(10.0 <= s.start_s <= s.end_s <= 11.5 for s in waterfall.stages)


def test_stages_are_bounded():
    waterfall = Waterfall()
    for _ in range(MAX_STAGES + 5):
        waterfall.add("flush", 1.0, 2.0)
    assert len(waterfall.stages) == MAX_STAGES
