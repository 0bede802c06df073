"""docs/cases.md lists all forty cases, and the files that it names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROWS = re.findall(
    r"^\| (RB-O\d\d) \|.*\| (.*) \| (.*) \|$", (ROOT / "docs/cases.md").read_text(), re.M
)


def test_all_forty_have_a_state():
    assert [case for case, _, _ in ROWS] == [f"RB-O{i:02}" for i in range(1, 41)]
    assert {state for _, state, _ in ROWS} <= {"tested", "in part", "later", "not applicable"}


def test_where_a_case_is_tested_there_are_tests():
    for case, state, where in ROWS:
        files = re.findall(r"`((?:tests|gateway)/[^`]+)`", where)
        assert files or state in ("later", "not applicable"), case
        assert [file for file in files if not (ROOT / file).exists()] == [], case
