"""What the benchmarks of running clusters make of the records of their requests."""

import argparse

import pytest

from bench.live import arguments
from bench.live.overload import Overloaded
from bench.live.steady import Window, is_good, refusal_s
from bench.live.tenants import Flooded, Turn
from bench.load.request import Failure, Record
from core.errors import InvalidRequest, TandemError, Unavailable

REFUSED = Failure(kind="http_503", detail="about 20 s of work wait before it")


def answered(at_s: float, *, ttft_s: float = 0.5, took_s: float = 1.0, tokens: int = 4) -> Record:
    return Record(
        intended_s=at_s,
        sent_s=at_s,
        token_times_s=(at_s + ttft_s, at_s + took_s),
        finished_s=at_s + took_s,
        max_tokens=4,
        completion_tokens=tokens,
    )


def failed(at_s: float, *, took_s: float, token_times_s: tuple[float, ...] = ()) -> Record:
    return Record(
        intended_s=at_s,
        sent_s=at_s,
        token_times_s=token_times_s,
        finished_s=at_s + took_s,
        max_tokens=4,
        completion_tokens=len(token_times_s),
        failure=REFUSED,
    )


def test_only_a_whole_answer_in_time_is_good():
    assert is_good(answered(1.0, took_s=5.0), deadline_s=5.0)
    assert not is_good(answered(1.0, took_s=5.1), deadline_s=5.0)
    assert not is_good(answered(1.0, tokens=3), deadline_s=5.0)
    assert not is_good(failed(1.0, took_s=0.1), deadline_s=5.0)


def test_a_refusal_is_known_by_its_lack_of_tokens_and_counts_from_when_it_was_to_be_sent():
    assert refusal_s(failed(2.0, took_s=0.25)) == pytest.approx(0.25)
    assert refusal_s(failed(2.0, took_s=3.0, token_times_s=(2.5,))) is None
    assert refusal_s(answered(2.0)) is None


def test_answers_of_the_ramps_do_not_count():
    # Two users, a second an answer: the first pair is the ramp up, the last pair the ramp down.
    records = [answered(float(turn)) for turn in range(5) for _ in range(2)]
    window = Window.of_closed_loop(records, concurrency=2)
    assert (window.from_s, window.until_s) == (1.0, 4.0)
    assert window.good_per_s(records, deadline_s=2.0) == 2.0


def test_a_load_that_never_settled_is_no_figure():
    with pytest.raises(Unavailable, match="more requests"):
        Window.of_open_loop([answered(0.0), answered(1.0)], settle_s=5.0)


def overloaded(records: list[Record], capacity_per_s: float = 1.0) -> Overloaded:
    return Overloaded.of(
        records,
        capacity_per_s=capacity_per_s,
        offered_per_s=10.0,
        settle_s=2.0,
        deadline_s=5.0,
    )


def test_overload_is_borne_where_answers_keep_coming_and_refusals_are_quick():
    records = [answered(float(at)) for at in range(13)]
    records += [failed(at / 9, took_s=0.02) for at in range(100)]
    found = overloaded(records)
    assert (found.good, found.refused, found.wasted) == (13, 100, 0)
    assert found.share == pytest.approx(1.0)
    assert found.kept
    assert found.errors == {"http_503": 100}


@pytest.mark.parametrize(
    "records",
    [
        [answered(float(at)) for at in range(0, 13, 2)],
        [answered(float(at)) for at in range(13)] + [failed(1.0, took_s=0.2)],
        [answered(float(at), took_s=6.0) for at in range(13)],
    ],
    ids=["fewer answers", "a slow refusal", "answers that come too late"],
)
def test_overload_is_not_borne_with(records: list[Record]):
    assert not overloaded(records).kept


def test_work_in_vain_is_told():
    broken = failed(3.0, took_s=4.0, token_times_s=(3.5,))
    found = overloaded([*(answered(float(at)) for at in range(13)), broken])
    assert (found.refused, found.wasted) == (0, 1)


def flooded(alone: list[Record], beside: list[Record], flood: list[Record]) -> Flooded:
    return Flooded.of(
        [Turn(quiet=alone)],
        [Turn(quiet=beside, flood=flood)],
        capacity_per_s=1.0,
        quiet_per_s=0.2,
        flood_per_s=4.0,
        deadline_s=5.0,
    )


def test_the_flood_is_judged_by_what_the_other_tenant_waits():
    alone = [answered(float(at), ttft_s=0.2) for at in range(10)]
    flood = [answered(float(at), ttft_s=0.9) for at in range(5)] + [failed(1.0, took_s=0.1)]
    near = flooded(alone, [answered(float(at), ttft_s=0.3) for at in range(10)], flood)
    assert near.ratio == pytest.approx(1.5)
    assert (near.flood_good, near.flood_requests) == (5, 6)
    far = flooded(alone, [answered(float(at), ttft_s=0.4) for at in range(10)], flood)
    assert far.ratio == pytest.approx(2.0)
    assert not far.kept


def test_a_quiet_tenant_that_is_turned_away_breaks_the_promise_however_quick_the_rest_is():
    alone = [answered(float(at)) for at in range(10)]
    found = flooded(alone, [*alone, failed(3.0, took_s=0.1)], [])
    assert found.ratio == 1.0
    assert not found.kept


def test_no_answer_at_all_is_no_figure():
    with pytest.raises(TandemError, match="quiet tenant"):
        flooded([answered(0.0)], [failed(0.0, took_s=0.1)], [])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--input-len", "0"], "--input-len must be positive, not 0"),
        (["--deadline-s", "nan"], "--deadline-s must be positive, not nan"),
        (["--capacity-requests", "20"], r"three times --concurrency \(48\), not 20"),
    ],
)
def test_a_flag_that_no_load_can_be_made_of_is_named(flags: list[str], named: str):
    asked: argparse.Namespace = arguments.parser("overload", "").parse_args(flags)
    with pytest.raises(InvalidRequest, match=named):
        arguments.shape(asked)
