"""A comparison's order, ratios and arms, as they are written on the command line."""

import json
import os
from dataclasses import dataclass

import pytest

from bench.arms import parse_command_arm, parse_ready, parse_url_arm
from bench.compare import Turn, figures, in_turn, ratios
from bench.comparison_table import comparison
from bench.load.measure import Measurement
from bench.load.request import Failure, Record
from bench.load.summary import Slo, summarise
from bench.process_tree import Memory, ProcessTree
from bench.suites import SUITES, suite
from bench.tandem_arm import parse_tandem_arm
from core.errors import ConfigError, InvalidRequest


@dataclass
class Named:
    name: str


def turn(arm: str, number: int, token_s: float, *, ok: bool = True) -> Turn:
    """Two tokens, so far apart."""
    record = Record(
        intended_s=0.0,
        sent_s=0.0,
        token_times_s=(token_s, 2 * token_s) if ok else (),
        finished_s=2 * token_s,
        max_tokens=2,
        completion_tokens=2 if ok else 0,
        failure=None if ok else Failure(kind="connection_refused", detail="gone"),
    )
    measurement = Measurement(
        records=[record], summary=summarise([record], Slo()), client_cpu_share=0.01
    )
    memory = Memory(pss_bytes=2**20, rss_bytes=2**21)
    return Turn(case="c", round=number, arm=arm, measurement=measurement, memory=memory)


def test_each_arm_goes_first_in_turn():
    arms = [Named("a"), Named("b"), Named("c")]
    order = [[arm.name for arm in in_turn(arms, number)] for number in range(4)]
    assert order == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_ratios_are_taken_within_a_round():
    mine = [{"x": 2.0, "y": None}, {"x": 30.0, "y": 1.0}, {"x": 5.0, "y": 1.0}]
    base = [{"x": 1.0, "y": 1.0}, {"x": 10.0, "y": 0.0}, {"x": 5.0, "y": None}]
    assert ratios(mine, base) == {"x": {"median": 2.0, "rounds": [2.0, 3.0, 1.0]}}


def test_figures_have_medians_rounds_and_ratios_to_the_baseline():
    turns = [turn("a", 0, 1.0), turn("b", 0, 2.0), turn("b", 1, 4.0), turn("a", 1, 1.0)]
    found = figures(turns, "b")["c"]
    assert found["arms"]["b"]["median"]["ttft_ms_p50"] == 3000
    assert found["arms"]["a"]["rounds"][0]["memory"]["pss_bytes"] == 2**20
    assert found["ratios"]["a"]["output_tokens_per_s"] == {"median": 3.0, "rounds": [2.0, 4.0]}
    assert found["ratios"]["a"]["ttft_ms_p50"]["rounds"] == [0.5, 0.25]
    assert "b" not in found["ratios"]
    json.dumps(found, allow_nan=False)


def test_an_arm_that_died_has_errors_and_no_latencies():
    turns = [turn("a", 0, 1.0), turn("b", 0, 1.0), turn("b", 1, 1.0), turn("a", 1, 1.0, ok=False)]
    found = figures(turns, "b")["c"]
    assert found["arms"]["a"]["errors"] == {"connection_refused": 1}
    assert found["ratios"]["a"]["ttft_ms_p50"]["rounds"] == [1.0]
    assert found["ratios"]["a"]["output_tokens_per_s"]["rounds"] == [1.0, 0.0]
    text = comparison({"c": found}, "b")
    assert "a / b" in text
    assert text.splitlines()[1].split()[-1] == "errors"
    assert text.splitlines()[2].split()[-1] == "1"


def test_arms_are_read_from_single_words():
    assert parse_url_arm("x=http://h:1/v1?a=b").url == "http://h:1/v1?a=b"
    arm = parse_command_arm("v=A=1 serve --port {port}", {"v": "/health"})
    assert (arm.command, arm.ready_path) == ("A=1 serve --port {port}", "/health")
    assert parse_ready("v=/health") == ("v", "/health")


def test_a_cluster_is_read_from_its_pool_sizes_and_settings():
    below = {"engine": {"threads": 1, "dtype": "float32"}}
    arm = parse_tandem_arm("two=2:3,engine.threads=2,gateway.host=127.0.0.2,log_level=info", below)
    assert arm.settings == {
        "log_level": "info",
        "engine": {"threads": 2, "dtype": "float32"},
        "gateway": {"host": "127.0.0.2"},
        "prefill_workers": 2,
        "decode_workers": 3,
    }


@pytest.mark.parametrize("text", ["x", "x=", "x=1", "=1:1", "x=1:b", "x=1:1,a", "x=1:1,a.b.c=1"])
def test_what_is_no_cluster_is_refused(text: str):
    with pytest.raises(InvalidRequest):
        parse_tandem_arm(text, {})


def test_a_setting_that_is_none_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"--tandem x: engine\.nope"):
        parse_tandem_arm("x=1:1,engine.nope=1", {})


@pytest.mark.parametrize("text", ["x", "x=", "=serve {port}", "x=serve"])
def test_what_is_no_command_is_refused(text: str):
    with pytest.raises(InvalidRequest):
        parse_command_arm(text, {})


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_a_load_that_can_be_sent(name: str):
    made = suite(name, None, num_requests=3)
    assert made.about
    for case in made.cases:
        assert case.plan.checked().fitted(4096).num_requests == 3


def test_a_suite_that_is_none_is_refused():
    with pytest.raises(InvalidRequest, match="no suite nope: one of random"):
        suite("nope", None)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's /proc")
def test_a_process_tree_knows_what_it_takes():
    me = ProcessTree(os.getpid())
    assert me.pids()[0] == os.getpid()
    before_s = me.cpu_s()
    while me.cpu_s() == before_s:
        pass
    memory = me.memory()
    assert 0 < memory.pss_bytes <= memory.rss_bytes
    assert ProcessTree(2**22 + 1).pids() == []
