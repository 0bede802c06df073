"""docs/api.md has every field and every error of the HTTP API."""

import re
from pathlib import Path

import pytest

from core.config import GatewayConfig
from gateway.openapi import document
from gateway.validation import Limits

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text()
# What stands between backticks in the first two cells of some table's row.
NAMED = {
    name
    for line in PAGE.splitlines()
    if line.startswith("| ")
    for cell in line.split(" | ")[:2]
    for name in re.findall(r"`([^`]+)`", cell)
}
LIMITS = Limits(
    served_name="model", window=64, vocab_size=100, max_stop_strings=1, max_stop_chars=1
)
DOCUMENT = document(GatewayConfig(), LIMITS)
BODIES = ("ChatBody", "CompletionBody", "Message", "StreamOptions", "TokenizeBody")


@pytest.mark.parametrize("body", BODIES)
def test_every_field_is_on_the_page(body):
    fields = DOCUMENT["components"]["schemas"][body]["properties"]
    assert set(fields) - NAMED == set()


def test_every_route_is_on_the_page():
    for path in DOCUMENT["paths"]:
        assert path.replace("{model_id}", "{id}") in PAGE


def test_every_status_is_on_the_page():
    statuses = {
        status
        for item in DOCUMENT["paths"].values()
        for operation in item.values()
        for status in operation["responses"]
    }
    assert {status for status in statuses if f"\n| {status} |" not in PAGE} == {"200"}


def test_the_ranges_are_on_the_page():
    for row in ("| `temperature` | number | 0 … 2 | 1 |", "| `top_k` | integer | ≥ -1 | 0 |"):
        assert row in PAGE
