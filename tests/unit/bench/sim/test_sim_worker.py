"""One simulated worker: it steps as the engine does, no faster than the hardware."""

import pytest

from bench.sim.agenda import Agenda
from bench.sim.job import Job, make_job
from bench.sim.worker import SimWorker, StepTaken, WorkerShape
from core.messages import TransferId
from engine.pacing import StepPacer


class Feeder:
    """Gives a worker jobs when their time comes, as soon as there are blocks for their prompts."""

    def __init__(self, worker_class, timing, shape, requests, *, itl_target_s=0.02):
        self.agenda = Agenda()
        self.done = []
        pacer = StepPacer(target_s=itl_target_s, max_tokens=shape.max_step_tokens)
        self.worker = worker_class("w", shape, timing, pacer, self.agenda, self)
        self.steps: list[StepTaken] = []
        self.worker.watch = self.steps.append
        self.waiting = []
        for request in requests:
            self.agenda.at(request.arrival_s, self.arrive, request)
        self.agenda.run(until=lambda: len(self.done) == len(requests), horizon_s=1e5)

    def arrive(self, request):
        self.waiting.append(request)
        self.admit()

    def admit(self):
        while self.waiting and not self.worker.num_preempted:
            request = self.waiting[0]
            needed = self.worker.blocks_for(request.prompt_tokens + 1)
            if needed > self.worker.blocks.num_available:
                return
            self.waiting.pop(0)
            job = make_job(
                TransferId(request_id=str(request.index), attempt=1),
                self.worker.blocks.acquire(needed),
                prompt_tokens=request.prompt_tokens,
                known_tokens=request.prompt_tokens,
                computed_tokens=0,
                end_tokens=request.prompt_tokens + request.output_tokens,
            )
            self.worker.add(job)

    def chunk_read(self, job, num_tokens, began_s): ...

    def token_made(self, job): ...

    def preemption_turned(self): ...

    def finished(self, job: Job):
        self.done.append((job.key, tuple(job.times_s), job.sequence.num_preemptions))
        job.sequence.lease.release()
        self.admit()


class PlanningAll(SimWorker):
    """Asks `plan_step` for every sequence in every step."""

    def _take_in(self):
        return False


def _shape(num_blocks=9000, max_seqs=64):
    return WorkerShape(
        num_blocks=num_blocks, block_size=16, max_step_tokens=2048, max_seqs=max_seqs
    )


@pytest.mark.parametrize(
    ("num_blocks", "max_seqs"),
    [(9000, 64), (600, 64), (400, 64), (9000, 6)],
    ids=["roomy", "preempting", "preempting-much", "few-sequences"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_batch_of_sums_steps_as_a_plan_over_every_sequence(
    h100, load, num_blocks, max_seqs, seed
):
    requests = load(60, 60, seed=seed)
    fast, full = (
        Feeder(kind, h100, _shape(num_blocks, max_seqs), requests)
        for kind in (SimWorker, PlanningAll)
    )
    assert fast.steps == full.steps
    assert sorted(fast.done, key=str) == sorted(full.done, key=str)
    assert fast.worker.preemptions == full.worker.preemptions
    assert (fast.worker.preemptions > 0) == (num_blocks < 9000)


def test_no_step_is_faster_than_the_hardware(h100, load):
    feeder = Feeder(SimWorker, h100, _shape(), load(16, 100))
    for step in feeder.steps:
        pairs = sum(c.num_tokens * (c.start + c.num_tokens / 2) for c in step.chunks)
        floor_s = h100.floor.step_s(
            prompt_tokens=sum(chunk.num_tokens for chunk in step.chunks),
            prompt_pairs=pairs,
            num_decodes=step.num_decodes,
            context_tokens=step.context_tokens,
        )
        assert step.compute_s >= floor_s
    assert {bool(step.chunks) for step in feeder.steps} == {True, False}


def test_every_token_is_made_once_and_every_block_comes_back(h100, load):
    requests = load(16, 80)
    feeder = Feeder(SimWorker, h100, _shape(num_blocks=700), requests)
    made = {key.transfer.request_id: len(times_s) for key, times_s, _ in feeder.done}
    assert made == {str(r.index): r.output_tokens for r in requests}
    feeder.worker.blocks.check()
    assert feeder.worker.blocks.counts().free == 700


def test_a_reader_of_equal_prompts_is_an_m_d_1_queue(h100, load):
    """Pollaczek-Khinchine: with service s and utilisation r, the mean wait is r s / 2 (1 - r)."""
    import dataclasses

    service_s = h100.prefill_s(1000)
    rho = 0.7
    requests = [
        dataclasses.replace(request, prompt_tokens=1000, output_tokens=1)
        for request in load(rho / service_s, 8_000)
    ]

    class OneByOne(Feeder):
        def admit(self):
            if self.worker.num_jobs == 0:
                super().admit()

    shape = WorkerShape(
        num_blocks=63, block_size=16, max_step_tokens=2048, max_seqs=1, prompts_at_once=1
    )
    feeder = OneByOne(SimWorker, h100, shape, requests, itl_target_s=None)
    ends_s = {int(key.transfer.request_id): times_s[-1] for key, times_s, _ in feeder.done}
    waits_s = [ends_s[r.index] - r.arrival_s - service_s for r in requests]
    expected_s = rho * service_s / (2 * (1 - rho))
    assert sum(waits_s) / len(waits_s) == pytest.approx(expected_s, rel=0.05)
