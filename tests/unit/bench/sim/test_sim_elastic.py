"""Workers that turn in virtual time: the real controller says who, and no client notices."""

from bench.sim.agenda import Agenda
from bench.sim.shape import ClusterShape
from bench.sim.switching import Phase, arrivals
from bench.sim.system import run
from bench.sim.tandem import Tandem
from bench.sim.trace import TraceRow

READING = Phase(lengths=[TraceRow(6000, 150)], rate=11)
ANSWERING = Phase(lengths=[TraceRow(60, 500)], rate=20)


def test_workers_turn_with_the_load_and_no_token_is_lost(h100):
    shape = ClusterShape(prefill_workers=1, decode_workers=3, local_prefill="never", elastic="auto")
    agenda = Agenda()
    system = Tandem(shape, h100, agenda)
    result = run(system, agenda, arrivals(1.0, [READING], phase_s=45))
    assert system.num_turns >= 1
    assert sum(outcome.num_moves for outcome in result.outcomes) > 0
    assert all(o.ok and o.num_tokens == o.request.output_tokens for o in result.outcomes)
    last_s = agenda.now_s + 1.0
    agenda.run(until=lambda: agenda.now_s >= last_s, horizon_s=last_s + 10)
    for member in system.members.values():
        member.worker.blocks.check()
        counts = member.worker.counts()
        assert counts.free + counts.cached == member.worker.shape.num_blocks, member.name
        assert not member.load().turning


def test_phases_follow_each_other_each_at_its_own_rate():
    requests = arrivals(0.5, [READING, ANSWERING], phase_s=100)
    first = [each for each in requests if each.prompt_tokens == 6000]
    assert requests[: len(first)] == first
    assert first[-1].arrival_s < 100 <= requests[len(first)].arrival_s
    assert 450 < len(first) < 650 and 850 < len(requests) - len(first) < 1150
