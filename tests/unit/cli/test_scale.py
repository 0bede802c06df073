"""What `tandem scale` says, and what it does not take."""

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.scale import report
from core.errors import InvalidRequest

FOUND = {
    "elastic": "auto",
    "override": None,
    "now": {"prefill": 1, "decode": 3},
    "target": {"prefill": 2, "decode": 2},
    "wanted": {"prefill": 2, "decode": 1},
    "load": {"prefill": 1.2, "decode": 0.4},
    "workers": [
        {
            "worker": "decode-0/ab",
            "role": "prefill",
            "turning": True,
            "draining": False,
            "num_placed": 3,
        }
    ],
}


def test_it_tells_who_serves_what_and_what_is_wished_for():
    assert report(FOUND).splitlines() == [
        "now     1 prefill + 3 decode (the demand decides)",
        "target  2 prefill + 2 decode",
        "wanted  2 prefill + 1 decode for the demand alone",
        "load    reading keeps 1.20 workers busy, decoding 0.40",
        "decode-0/ab  prefill     3 placed  turning",
    ]


def test_it_tells_that_a_person_chose_and_how_to_undo_it():
    chosen = report(FOUND | {"override": {"prefill": 2, "decode": 2}})
    assert "(chosen: 2 prefill + 2 decode; `tandem scale --auto` lets the demand" in chosen


def test_before_anything_was_measured_there_is_no_load():
    assert "load" not in report(FOUND | {"load": None, "target": None, "workers": []})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--prefill 2", "--decode is needed as well"),
        ("--decode 2", "--prefill is needed as well"),
        ("--auto --prefill 1", "--auto takes no numbers"),
        ("--url nowhere", "nowhere is not a URL"),
    ],
)
def test_a_wrong_word_is_refused_by_name(arguments, said):
    done = CliRunner().invoke(app, ["scale", *arguments.split()])
    assert done.stdout == ""
    assert isinstance(done.exception, InvalidRequest)
    assert said in done.exception.message
