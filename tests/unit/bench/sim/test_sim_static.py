"""The baselines: splits that nobody schedules, and workers that do everything."""

import dataclasses

import pytest

from bench.sim.agenda import Agenda
from bench.sim.colocated import Colocated, FixedChunk
from bench.sim.figures import SimSlo, good_share
from bench.sim.goodput import PRECISION, highest_rate
from bench.sim.request import SimRequest
from bench.sim.static_split import StaticSplit
from bench.sim.system import run
from core.errors import InvalidRequest


def _alone(system_of, prompt_tokens=1000, output_tokens=11):
    agenda = Agenda()
    system = system_of(agenda)
    request = SimRequest(
        index=0, arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    return run(system, agenda, [request]).outcomes[0]


def test_one_request_alone_takes_what_the_model_says(h100):
    outcome = _alone(lambda agenda: StaticSplit(1, 1, h100, agenda))
    transfer_s = 1000 * h100.kv_token_bytes / h100.link_bytes_per_s
    # All but the last layer's share is hidden behind the prefill.
    first_s = h100.prefill_s(1000) + transfer_s / h100.num_layers + h100.link_fixed_s
    assert outcome.ttft_s == pytest.approx(first_s)
    steps_s = sum(h100.decode_s(1, 1000 + n) for n in range(1, 11))
    assert outcome.e2e_s == pytest.approx(first_s + steps_s)
    assert outcome.tpot_s == pytest.approx(steps_s / 10)


def test_a_slow_link_is_exposed(h100):
    slow = dataclasses.replace(h100, link_bytes_per_s=1e9)
    outcome = _alone(lambda agenda: StaticSplit(1, 1, slow, agenda))
    compute_s = h100.prefill_s(1000)
    transfer_s = 1000 * h100.kv_token_bytes / 1e9
    hidden_s = compute_s * (1 - 1 / h100.num_layers)
    assert outcome.ttft_s == pytest.approx(compute_s + transfer_s - hidden_s + slow.link_fixed_s)


def test_small_pieces_cost_the_link_time(h100):
    costly = dataclasses.replace(h100, link_piece_s=1e-4)
    outcome = _alone(lambda agenda: StaticSplit(1, 1, costly, agenda))
    assert outcome.ttft_s > _alone(lambda agenda: StaticSplit(1, 1, h100, agenda)).ttft_s + 0.1


def test_a_chunk_is_what_decoding_leaves_but_at_least_32():
    assert FixedChunk(512).max_prompt_tokens(100) == 412
    assert FixedChunk(512).max_prompt_tokens(500) == 32


def test_colocated_workers_trade_gaps_for_first_tokens(h100, load):
    def tbt_and_ttft(chunk):
        agenda = Agenda()
        done = run(Colocated(2, chunk, h100, agenda), agenda, load(20, 400)).outcomes
        return sum(o.tbt10_s for o in done), sum(o.ttft_s for o in done)

    small, large = tbt_and_ttft(128), tbt_and_ttft(4096)
    assert small[0] < large[0]
    assert small[1] > large[1]


def test_everything_is_the_same_for_the_same_seed(h100, load):
    def times(seed):
        agenda = Agenda()
        done = run(StaticSplit(1, 1, h100, agenda), agenda, load(10, 200, seed=seed)).outcomes
        return [(o.first_token_s, o.finished_s) for o in done]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_the_highest_rate_is_found_within_its_precision():
    asked = []

    def share_at(rate):
        asked.append(rate)
        return 1.0 if rate <= 37.0 else 0.5

    found = highest_rate(share_at, 0.9, guess=3.0)
    assert found <= 37.0 < found * (1 + PRECISION)
    assert found in asked


def test_an_slo_that_nothing_keeps_to_is_an_error(h100, load):
    def share_at(rate):
        agenda = Agenda()
        done = run(StaticSplit(1, 1, h100, agenda), agenda, load(rate, 20)).outcomes
        return good_share(done, SimSlo(ttft_ms=0.001))

    with pytest.raises(InvalidRequest, match="no load is light enough"):
        highest_rate(share_at, 0.9)
