"""What a person and a file get of a measurement."""

import json
from pathlib import Path

import pytest

from bench.load.measure import Measurement
from bench.load.request import Failure, Record
from bench.load.summary import Slo, summarise
from bench.load.table import grid, number, one_load
from bench.plot import check_plot
from bench.raw import as_json, check_writable
from core.errors import InvalidRequest, TandemError


def measurement(*failures: str) -> Measurement:
    """One answer of three tokens, and requests that failed in these words."""
    answered = Record(
        intended_s=0.0,
        sent_s=0.002,
        token_times_s=(0.5, 0.75, 1.0),
        finished_s=1.0,
        max_tokens=3,
        completion_tokens=3,
        prompt_tokens=10,
        cached_tokens=5,
    )
    failed = [
        Record(
            intended_s=0.0,
            sent_s=0.0,
            token_times_s=(),
            finished_s=1.0,
            max_tokens=3,
            completion_tokens=0,
            failure=Failure(kind="http_503", detail=detail),
        )
        for detail in failures
    ]
    records = [answered, *failed]
    summary = summarise(records, Slo(ttft_ms=600))
    return Measurement(records=records, summary=summary, client_cpu_share=0.01)


def test_a_load_is_told_with_units_and_without_what_is_not_there():
    text = one_load(measurement())
    assert "1 of 1 completed" in text
    assert "3 tokens, 3 per s" in text
    assert "10 tokens, 50% of them cached" in text
    assert "1 requests per s within the SLO" in text
    assert "1.0% of a core, 2.0 ms late at most" in text
    assert ["ITL", "250", "250", "250", "250", "250"] in [row.split() for row in text.splitlines()]
    assert "error" not in text


def test_errors_are_told_by_kind_with_each_reason_once():
    text = one_load(measurement("full", "full", "no"))
    assert "http_503: 3" in text
    assert text.count("full") == 1


def test_a_grid_has_its_names_left_and_its_numbers_right():
    assert grid([["", "ms"], ["longer", "5"]]) == "        ms\nlonger   5"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0, "0"), (0.1234, "0.123"), (12.34, "12.3"), (1234.6, "1,235")],
)
def test_numbers_have_the_digits_that_count(value: float | None, shown: str):
    assert number(value) == shown


def test_raw_figures_are_json():
    (answered, failed) = json.loads(json.dumps(as_json(measurement("no").records)))
    assert answered["token_times_s"] == [0.5, 0.75, 1.0]
    assert failed["failure"] == {"kind": "http_503", "detail": "no"}


@pytest.mark.parametrize("path", [Path("/nonexistent/raw.json"), Path("/")])
def test_a_file_that_cannot_be_is_refused_before_the_run(path: Path):
    with pytest.raises(InvalidRequest, match="no file can be written there"):
        check_writable(path)


def test_a_picture_that_cannot_be_is_refused_before_the_run():
    with pytest.raises(TandemError, match=r"--plot needs matplotlib|ends in \.png"):
        check_plot(Path("picture.svg"))
