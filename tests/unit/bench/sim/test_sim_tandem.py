"""This code's own cluster in virtual time: nothing is lost, and the scheduler is the real one."""

import dataclasses

import pytest

from bench.sim.agenda import Agenda
from bench.sim.event_log import EventLog, recorded, replayed
from bench.sim.shape import ClusterShape
from bench.sim.system import run
from bench.sim.tandem import Death, Tandem, scheduler_config
from bench.sim.trace import TraceRow
from bench.sim.virtual_desk import MODEL
from bench.sim.workload import Arrivals, draw
from core.errors import ConfigError
from core.messages import Placement
from core.tickets import Tickets
from scheduler.desk import SchedulerDesk


def _balanced(system):
    """Every block of every living worker is free, or cached, again."""
    for member in system.members.values():
        member.worker.blocks.check()
        counts = member.worker.counts()
        assert counts.free + counts.cached == member.worker.shape.num_blocks, member.name


def _settle(system):
    """What is still on its way after the last token, such as a prefill worker's release."""
    agenda = system._agenda
    last_s = agenda.now_s + 1.0
    agenda.run(until=lambda: agenda.now_s >= last_s, horizon_s=last_s + 10)


def test_every_request_gets_every_token_and_every_block_comes_back(load, run_tandem):
    requests = load(20, 200)
    system, result = run_tandem(requests)
    assert all(o.ok and o.num_tokens == o.request.output_tokens for o in result.outcomes)
    assert system.num_sessions == 0
    readers = {outcome.read_by.split("-")[0] for outcome in result.outcomes}
    assert readers == {"prefill", "decode"}
    _settle(system)
    _balanced(system)


def test_a_small_pool_preempts_and_still_loses_nothing(h100, load, run_tandem):
    small = dataclasses.replace(h100, kv_tokens=6800)
    shape = ClusterShape(reserve_answer_tokens=1, max_new_tokens=300)
    system, result = run_tandem(load(40, 150), shape, timing=small)
    assert result.preemptions > 0
    assert all(o.ok and o.num_tokens == o.request.output_tokens for o in result.outcomes)
    _settle(system)
    _balanced(system)


def test_littles_law(load, run_tandem):
    """The mean number of requests in the system is their rate times their mean time in it."""
    requests = load(15, 600)
    _, result = run_tandem(requests)
    moves = sorted(
        [(o.request.arrival_s, 1) for o in result.outcomes]
        + [(o.finished_s, -1) for o in result.outcomes]
    )
    began_s, ended_s = moves[0][0], moves[-1][0]
    area, inside, last_s = 0.0, 0, began_s
    for at_s, change in moves:
        area += inside * (at_s - last_s)
        inside, last_s = inside + change, at_s
    assert inside == 0
    mean_inside = area / (ended_s - began_s)
    rate = len(requests) / (ended_s - began_s)
    mean_time_s = sum(o.e2e_s for o in result.outcomes) / len(requests)
    assert mean_inside == pytest.approx(rate * mean_time_s)


def test_the_same_seed_gives_the_same_run(load, run_tandem):
    def times(seed):
        _, result = run_tandem(load(20, 150, seed=seed))
        return [(o.first_token_s, o.finished_s, o.read_by) for o in result.outcomes]

    assert times(3) == times(3)
    assert times(3) != times(4)


def test_no_request_is_faster_than_its_own_work(h100, load, run_tandem):
    _, result = run_tandem(load(10, 150))
    for outcome in result.outcomes:
        request = outcome.request
        prompt_s = h100.floor.step_s(
            prompt_tokens=request.prompt_tokens,
            prompt_pairs=request.prompt_tokens**2 / 2,
            num_decodes=0,
            context_tokens=0,
        )
        step_s = h100.floor.step_s(
            prompt_tokens=0, prompt_pairs=0, num_decodes=1, context_tokens=request.prompt_tokens
        )
        assert outcome.ttft_s >= prompt_s
        assert outcome.e2e_s >= prompt_s + (request.output_tokens - 1) * step_s


def test_slow_messages_cost_first_tokens(h100, load, run_tandem):
    def ttft_s(**changes):
        timing = dataclasses.replace(h100, **changes)
        done = run_tandem(load(20, 150), timing=timing)[1].outcomes
        return sum(o.ttft_s for o in done) / len(done)

    # A prompt that a decode worker reads needs four, one that is handed over six.
    assert ttft_s(control_s=0.02) > ttft_s(control_s=0.0) + 4 * 0.02


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_a_worker_dies_and_no_request_is_lost(load, run_tandem, worker):
    shape = ClusterShape(prefill_workers=1, decode_workers=2, local_prefill="never")
    death = Death(worker=worker, at_s=3.0, back_after_s=2.0)
    system, result = run_tandem(load(20, 200), shape, deaths=[death])
    assert all(o.ok and o.num_tokens == o.request.output_tokens for o in result.outcomes)
    assert any(o.num_attempts > 1 for o in result.outcomes)
    assert system.members[worker].life == 1
    _settle(system)
    _balanced(system)


def test_prompts_that_begin_alike_share_blocks_where_the_trace_says_so(h100):
    rows = [TraceRow(2048, 8, hash_ids=(1, 2, 3, 4)), TraceRow(2048, 8, hash_ids=(1, 2, 5, 6))]
    arrivals = Arrivals(rate=5, num_requests=60)

    def cached(prefixes):
        requests = draw(rows, arrivals, block_size=16, prefixes=prefixes)
        agenda = Agenda()
        system = Tandem(ClusterShape(prefix_cache=prefixes), h100, agenda)
        done = run(system, agenda, requests).outcomes
        _settle(system)
        _balanced(system)
        return sum(o.cached_tokens for o in done)

    assert cached(False) == 0
    assert cached(True) > 30 * 1024


def test_another_scheduler_decides_the_same_when_told_the_same(h100, load, tmp_path):
    shape = ClusterShape(prefill_workers=1, decode_workers=2, prefix_cache=True)
    log = EventLog(scheduler_config(shape))
    agenda = Agenda()
    deaths = [Death(worker="decode-1", at_s=2.0, back_after_s=1.0)]
    run(Tandem(shape, h100, agenda, deaths=deaths, log=log), agenda, load(25, 150))
    log.store(tmp_path / "log.jsonl")
    stored = EventLog.load(tmp_path / "log.jsonl")
    assert stored.entries == log.entries

    def make_desk(config, clock):
        return SchedulerDesk(
            config, MODEL, Tickets(b"another secret of sixteen", now_s=clock), clock
        )

    answers = replayed(stored, make_desk)
    assert answers == recorded(log)
    assert sum(isinstance(answer, Placement) for answer in answers) >= 150


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"decode_workers": 0}, "at least one decode worker"),
        ({"prefill_workers": 0, "local_prefill": "never"}, "no prefill worker"),
        ({"block_size": 1_000_000}, "holds KV for"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(h100, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Tandem(ClusterShape(**changes), h100, Agenda())
