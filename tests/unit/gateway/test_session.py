"""A request survives the loss of a worker as one gapless stream, and is not tried for ever."""

import asyncio
from dataclasses import replace

import pytest

from core.block_hash import BlockHasher, short
from core.config import GatewayConfig, TelemetryConfig
from core.errors import (
    DataLoss,
    DeadlineExceeded,
    Moved,
    Overloaded,
    Unavailable,
    WorkerLost,
    to_failure,
)
from core.messages import (
    Ended,
    Endpoint,
    HandoffTiming,
    Placement,
    SamplingParams,
    StopReason,
    TokenLogprobs,
    Tokens,
    TransferId,
    WorkerRef,
)
from core.telemetry.context import TraceContext
from core.telemetry.exporter import SpanExporter
from core.telemetry.tracer import Tracer
from gateway.backend import Job
from gateway.decode_link import DecodeStream
from gateway.session import MAX_MOVES, ClusterBackend

PREFILL = Endpoint(worker=WorkerRef(name="p", incarnation="1"), address="unix:p")
ANSWER = list(range(100, 110))


def decode_worker(number):
    ref = WorkerRef(name=f"d{number}", incarnation="1")
    return Endpoint(worker=ref, address=f"unix:d{number}")


class FakeScheduler:
    """Places every attempt on the next decode worker."""

    def __init__(self):
        self.enqueued, self.prefilled_for, self.kept = [], [], []
        self.prefill = PREFILL

    async def place(self, enqueue):
        self.enqueued.append(enqueue)
        return Placement(
            transfer=enqueue.transfer,
            prefill=self.prefill,
            decode=decode_worker(len(self.enqueued)),
            queue_s=0.5,
        )

    def prefilled(self, transfer):
        self.prefilled_for.append(transfer)

    def keep_trace(self, keep):
        self.kept.append(keep.request_id)

    def give_up(self, error):
        """Nobody waits here: every attempt is placed at once."""


class FakeLink:
    """A decode worker that follows a script: tokens until it fails, or to the end."""

    def __init__(self, endpoint, script, cluster):
        self.endpoint, self._script, self._cluster = endpoint, script, cluster

    def start(self, start):
        self._cluster.started.append(start)
        stream = DecodeStream(max_unread_tokens=4096)
        position = len(start.branches[0].sent_token_ids)
        begun = False
        for step in self._script:
            if isinstance(step, Exception):
                end = Ended(
                    transfer=start.transfer, reason=StopReason.ERROR, failure=to_failure(step)
                )
                stream.put(end)
                break
            if isinstance(step, StopReason):
                stream.put(Ended(transfer=start.transfer, reason=step))
                break
            if isinstance(step, Tokens):
                stream.put(replace(step, transfer=start.transfer))
                continue
            tokens = tuple(ANSWER[position : position + step])
            timing = None if begun else HandoffTiming()
            begun = True
            stream.put(Tokens(transfer=start.transfer, token_ids=tokens, timing=timing))
            position += step
        return stream

    def keep_trace(self, request_id):
        self._cluster.kept.append((self.endpoint.worker.name, request_id))

    def cancel(self, transfer, reason, choices=()):
        if choices:
            self._cluster.cut_off.append((transfer, reason, choices))
        else:
            self._cluster.cancelled.append((transfer, reason))


class FakeDecodes:
    def __init__(self, *scripts):
        self._scripts = iter(scripts)
        self.started, self.cancelled, self.cut_off, self.kept = [], [], [], []

    def get(self, endpoint):
        return FakeLink(endpoint, next(self._scripts), self)


def lost(number):
    return WorkerLost("gone", culprit=decode_worker(number).worker)


def job(prompt=(1, 2, 3), remaining_s=10.0, **fields):
    return Job(
        request_id="r",
        model="m",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_new_tokens=10, seed=3),
        remaining_s=remaining_s,
        **fields,
    )


class Cluster:
    def __init__(self, *scripts, **config):
        self.scheduler, self.decodes = FakeScheduler(), FakeDecodes(*scripts)
        self.backend = ClusterBackend(self.scheduler, self.decodes, GatewayConfig(**config))

    async def tokens(self, asked=None):
        collected, reasons = [], []
        async with self.backend.open(asked or job()) as stream:
            async for batch in stream:
                collected += batch.token_ids
                if batch.stop_reason is not None:
                    reasons.append(batch.stop_reason)
        return collected, reasons


async def test_every_attempt_keeps_to_the_tenants_own_prefix_cache():
    cluster = Cluster([lost(1)], [4, StopReason.LENGTH])
    await cluster.tokens(job(cache_salt="acme"))
    assert [start.cache_salt for start in cluster.decodes.started] == ["acme", "acme"]


async def test_a_stream_goes_on_elsewhere_behind_the_tokens_already_sent():
    cluster = Cluster([3, 1, lost(1)], [4, 2, StopReason.LENGTH])
    tokens, reasons = await cluster.tokens()
    assert tokens == ANSWER
    assert reasons == [StopReason.LENGTH]
    first, second = cluster.decodes.started
    assert (first.transfer.attempt, second.transfer.attempt) == (1, 2)
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.branches[0].sent_token_ids == tuple(ANSWER[:4])
    assert second.sampling == first.sampling
    enqueue = cluster.scheduler.enqueued[1]
    assert enqueue.excluded_workers == ("d1/1",)
    assert (enqueue.prompt_tokens, enqueue.max_new_tokens) == (7, 6)


async def test_a_worker_lost_before_the_first_token_is_not_seen_by_the_client():
    cluster = Cluster([lost(1)], [10, StopReason.LENGTH])
    assert await cluster.tokens() == (ANSWER, [StopReason.LENGTH])


async def test_a_request_that_cost_two_workers_fails_and_its_prompt_is_refused():
    cluster = Cluster([2, lost(1)], [2, lost(2)], [10, StopReason.LENGTH])
    with pytest.raises(WorkerLost):
        await cluster.tokens()
    with pytest.raises(Overloaded, match="cost 2 workers"):
        await cluster.tokens()
    assert await cluster.tokens(job(prompt=(9,))) == (ANSWER, [StopReason.LENGTH])


async def test_a_prompt_that_one_tenant_may_not_send_for_a_while_is_anothers_to_send():
    cluster = Cluster([2, lost(1)], [2, lost(2)], [10, StopReason.LENGTH])
    with pytest.raises(WorkerLost):
        await cluster.tokens(job(cache_salt="acme"))
    with pytest.raises(Overloaded):
        await cluster.tokens(job(cache_salt="acme"))
    assert await cluster.tokens(job(cache_salt="other")) == (ANSWER, [StopReason.LENGTH])


async def test_a_prompt_that_one_model_refuses_for_a_while_is_served_by_another():
    cluster = Cluster([2, lost(1)], [2, lost(2)], [10, StopReason.LENGTH])
    with pytest.raises(WorkerLost):
        await cluster.tokens(replace(job(), model="large"))
    with pytest.raises(Overloaded):
        await cluster.tokens(replace(job(), model="large"))
    assert await cluster.tokens(replace(job(), model="small")) == (ANSWER, [StopReason.LENGTH])


async def test_damaged_blocks_are_tried_once_more_and_then_are_data_loss():
    cluster = Cluster([DataLoss("damaged")], [DataLoss("damaged")], [10, StopReason.LENGTH])
    with pytest.raises(DataLoss):
        await cluster.tokens()
    assert len(cluster.decodes.started) == 2


async def test_other_failures_are_tried_twice_more():
    cluster = Cluster(*[[Unavailable("draining")]] * 3)
    with pytest.raises(Unavailable):
        await cluster.tokens()
    assert len(cluster.decodes.started) == 3


@pytest.fixture
def no_pauses(monkeypatch):
    """Pauses that were asked for, in seconds; none is made."""
    asked = []

    async def pause(seconds):
        asked.append(seconds)

    monkeypatch.setattr("gateway.session.asyncio.sleep", pause)
    return asked


FULL = Overloaded("no free blocks")


async def test_a_worker_without_room_after_all_only_sends_the_request_back_to_the_queue(no_pauses):
    cluster = Cluster(*[[FULL]] * 4, [10, StopReason.LENGTH], retry_budget_floor=0)
    assert await cluster.tokens() == (ANSWER, [StopReason.LENGTH])
    assert [enqueue.transfer.attempt for enqueue in cluster.scheduler.enqueued] == [1, 2, 3, 4, 5]
    assert {enqueue.excluded_workers for enqueue in cluster.scheduler.enqueued} == {()}
    assert no_pauses == [0.1, 0.2, 0.4, 0.8]


async def test_a_request_that_finds_no_room_again_and_again_is_refused_in_the_end(no_pauses):
    cluster = Cluster(*[[FULL]] * 6)
    with pytest.raises(Overloaded):
        await cluster.tokens()
    assert len(cluster.decodes.started) == 6
    assert sum(no_pauses) == pytest.approx(3.1)


async def test_refusals_for_want_of_room_leave_the_retries_for_losses(no_pauses):
    cluster = Cluster([FULL], [FULL], [FULL], [2, lost(4)], [FULL], [8, StopReason.LENGTH])
    assert await cluster.tokens() == (ANSWER, [StopReason.LENGTH])
    assert cluster.scheduler.enqueued[-1].excluded_workers == ("d4/1",)


async def test_a_worker_that_gives_up_an_answer_it_began_is_a_failure_like_others(no_pauses):
    cluster = Cluster(*[[1, FULL]] * 3)
    with pytest.raises(Overloaded):
        await cluster.tokens()
    assert len(cluster.decodes.started) == 3
    assert no_pauses == []


MOVED = Moved("it turns")


async def test_a_worker_that_turns_or_leaves_costs_a_stream_nothing(no_pauses):
    cluster = Cluster(
        *[[1, MOVED]] * 4, [6, StopReason.LENGTH], retry_budget_floor=0, retry_budget_ratio=0.0
    )
    assert await cluster.tokens() == (ANSWER, [StopReason.LENGTH])
    assert [start.branches[0].sent_token_ids for start in cluster.decodes.started] == [
        tuple(ANSWER[:count]) for count in range(5)
    ]
    assert {enqueue.excluded_workers for enqueue in cluster.scheduler.enqueued} == {()}
    assert (cluster.backend.num_moves, cluster.backend.num_retries.total()) == (4, 0)
    assert no_pauses == []


async def test_a_worker_that_gave_a_request_up_on_arrival_is_given_time_to_say_so(no_pauses):
    cluster = Cluster([MOVED], [10, StopReason.LENGTH])
    assert await cluster.tokens() == (ANSWER, [StopReason.LENGTH])
    assert no_pauses == [0.05]


async def test_a_request_that_everybody_gives_up_fails_in_the_end(no_pauses):
    cluster = Cluster(*[[MOVED]] * (MAX_MOVES + 1))
    with pytest.raises(Moved):
        await cluster.tokens()
    assert len(cluster.decodes.started) == MAX_MOVES + 1


async def test_the_next_worker_is_chosen_by_who_has_the_answer_so_far():
    hasher = BlockHasher(bytes(32), 4)
    scheduler, decodes = FakeScheduler(), FakeDecodes([6, MOVED], [4, StopReason.LENGTH])
    backend = ClusterBackend(scheduler, decodes, GatewayConfig(), hasher=hasher)
    async with backend.open(job()) as stream:
        assert [batch.token_ids async for batch in stream]
    known = (*job().prompt_token_ids, *ANSWER[:6])
    first, second = scheduler.enqueued
    assert first.block_hashes == ()
    assert second.block_hashes == tuple(map(short, hasher.chain(known[:8])))


async def test_waiting_for_room_ends_with_the_deadline(monkeypatch):
    monkeypatch.setattr("gateway.session._REFUSED_PAUSE_S", 60.0)
    cluster = Cluster([FULL])
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(10):
            await cluster.tokens(job(remaining_s=0.05))
    assert len(cluster.decodes.started) == 1


async def test_a_stop_ends_waiting_for_room(monkeypatch):
    monkeypatch.setattr("gateway.session._REFUSED_PAUSE_S", 0.05)
    cluster = Cluster([FULL])
    asking = asyncio.create_task(cluster.tokens())
    async with asyncio.timeout(10):
        await asyncio.sleep(0)  # refused by now
        await cluster.backend.drain(0.0)
        with pytest.raises(Unavailable, match="stopping"):
            await asking
    assert len(cluster.decodes.started) == 1


async def test_a_placement_without_a_prefill_worker_is_decoded_like_others():
    cluster = Cluster([3, lost(1)], [7, StopReason.LENGTH])
    cluster.scheduler.prefill = None
    assert await cluster.tokens() == (ANSWER, [StopReason.LENGTH])
    assert [start.prefill for start in cluster.decodes.started] == [None, None]
    assert [each.attempt for each in cluster.scheduler.prefilled_for] == [1, 2]


async def test_past_the_retry_budget_a_request_fails_at_once():
    cluster = Cluster([lost(1)], retry_budget_ratio=0.0, retry_budget_floor=0)
    with pytest.raises(WorkerLost):
        await cluster.tokens()
    assert len(cluster.decodes.started) == 1


async def test_a_deadline_is_not_tried_again():
    cluster = Cluster([1, StopReason.TIMEOUT])
    with pytest.raises(DeadlineExceeded):
        await cluster.tokens()
    assert len(cluster.decodes.started) == 1


async def test_leaving_cancels_the_present_attempt_and_says_why():
    cluster = Cluster([1], [1])
    async with cluster.backend.open(job()) as stream:
        await anext(aiter(stream))
        stream.stop(StopReason.STOP_SEQUENCE)
    (cancelled,) = cluster.decodes.cancelled
    assert cancelled == (cluster.decodes.started[0].transfer, StopReason.STOP_SEQUENCE)


async def test_a_worker_that_keeps_silent_past_the_deadline_is_given_up(monkeypatch):
    monkeypatch.setattr("gateway.session._GRACE_S", 0.0)
    cluster = Cluster([])
    with pytest.raises(DeadlineExceeded, match="kept silent"):
        async with asyncio.timeout(10):
            await cluster.tokens(job(remaining_s=0.05))
    assert cluster.decodes.cancelled


async def test_only_the_first_attempts_times_are_told():
    cluster = Cluster([1, lost(1)], [1, StopReason.LENGTH])
    async with cluster.backend.open(job()) as stream:
        batches = [batch async for batch in stream]
    assert [batch.timing is not None for batch in batches] == [True, False]
    assert cluster.scheduler.prefilled_for[0].attempt == 1


async def test_a_stop_ends_what_outlasts_it_with_an_error():
    cluster = Cluster([2])
    async with cluster.backend.open(job()) as stream:
        batches = aiter(stream)
        assert (await anext(batches)).token_ids == (100, 101)
        draining = asyncio.create_task(cluster.backend.drain(0.01))
        with pytest.raises(Unavailable, match="stopping"):
            await anext(batches)
    await draining
    assert len(cluster.decodes.started) == 1


async def test_a_stop_waits_for_what_ends_in_time():
    cluster = Cluster([2, StopReason.LENGTH])
    await cluster.tokens()
    async with asyncio.timeout(5):
        await cluster.backend.drain(60.0)


def of(choice, *ids, ended=StopReason.UNSPECIFIED):
    """Tokens of one of several answers."""
    nowhere = TransferId(request_id="", attempt=0)
    return Tokens(transfer=nowhere, choice=choice, token_ids=ids, stop_reason=ended)


async def by_choice(cluster, asked):
    tokens, reasons = {}, {}
    async with cluster.backend.open(asked) as stream:
        async for batch in stream:
            assert batch.choice not in reasons
            tokens.setdefault(batch.choice, []).extend(batch.token_ids)
            if batch.stop_reason is not None:
                reasons[batch.choice] = batch.stop_reason
    return tokens, reasons


async def test_each_answer_goes_on_elsewhere_behind_its_own_tokens():
    first = [of(0, 1), of(1, 5, 6), of(2, 9, ended=StopReason.EOS), lost(1)]
    second = [
        of(1, 7, ended=StopReason.LENGTH),
        of(0, 2, 3),
        of(0, 4, ended=StopReason.EOS),
        StopReason.EOS,
    ]
    cluster = Cluster(first, second)
    tokens, reasons = await by_choice(cluster, job(num_choices=3))
    assert tokens == {0: [1, 2, 3, 4], 1: [5, 6, 7], 2: [9]}
    assert reasons == {0: StopReason.EOS, 1: StopReason.LENGTH, 2: StopReason.EOS}
    started = [[(b.choice, b.sent_token_ids) for b in s.branches] for s in cluster.decodes.started]
    assert started == [[(0, ()), (1, ()), (2, ())], [(1, (5, 6)), (0, (1,))]]
    enqueued = [
        (e.num_choices, e.prompt_tokens, e.max_new_tokens) for e in cluster.scheduler.enqueued
    ]
    assert enqueued == [(3, 3, 10), (2, 5, 8)]


async def test_an_answer_that_was_stopped_is_not_taken_up_again():
    cluster = Cluster(
        [of(0, 1), of(1, 5), lost(1)], [of(1, 6, ended=StopReason.EOS), StopReason.EOS]
    )
    async with cluster.backend.open(job(num_choices=2)) as stream:
        batches = aiter(stream)
        assert (await anext(batches)).choice == 0
        stream.stop(StopReason.STOP_SEQUENCE, 0)
        rest = [(batch.choice, batch.token_ids) async for batch in batches]
    assert rest == [(1, (5,)), (1, (6,))]
    (cut,) = cluster.decodes.cut_off
    assert cut[1:] == (StopReason.STOP_SEQUENCE, (0,))
    assert [b.choice for b in cluster.decodes.started[1].branches] == [1]
    assert cluster.decodes.cancelled == []


async def test_stopping_the_last_answer_ends_the_job_and_loses_nothing_that_came():
    cluster = Cluster([of(0, 1), of(1, 5, ended=StopReason.EOS)])
    async with cluster.backend.open(job(num_choices=2)) as stream:
        batches = aiter(stream)
        assert (await anext(batches)).choice == 0
        stream.stop(StopReason.STOP_SEQUENCE, 0)
        assert [(batch.choice, batch.token_ids) async for batch in batches] == [(1, (5,))]
    assert [reason for _, reason in cluster.decodes.cancelled] == [StopReason.STOP_SEQUENCE]
    assert cluster.decodes.cut_off == []


class Forgetful(SpanExporter):
    """A collector's queue that nobody reads."""

    def __init__(self):
        pass

    def offer(self, trace):
        pass


async def test_a_request_that_is_kept_is_kept_by_everyone_who_had_a_part_in_it():
    cluster = Cluster([lost(1)], [4, StopReason.LENGTH])
    trace = Tracer(TelemetryConfig(sample_ratio=0.0), Forgetful()).request(None)
    trace.serve("chat m", 0.0)
    await cluster.tokens(job(trace=trace))
    assert cluster.scheduler.kept == cluster.decodes.kept == []
    trace.keep()
    assert cluster.scheduler.kept == ["r"]
    assert cluster.decodes.kept == [("d1", "r"), ("d2", "r")]


async def test_nobody_is_told_to_keep_what_was_sampled():
    cluster = Cluster([4, StopReason.LENGTH])
    trace = Tracer(TelemetryConfig(sample_ratio=1.0), Forgetful()).request(None)
    trace.serve("chat m", 0.0)
    await cluster.tokens(job(trace=trace))
    trace.keep()
    assert cluster.scheduler.kept == cluster.decodes.kept == []
    (started,) = cluster.decodes.started
    assert TraceContext.parse(started.trace_context).sampled
    assert started.trace_context == cluster.scheduler.enqueued[0].trace_context


class TestPromptLogprobs:
    """The prompt's log probabilities are told once, whole, whatever becomes of attempts."""

    def pieces(self, *values):
        return Tokens(
            transfer=TransferId(request_id="r", attempt=1),
            token_ids=(),
            prompt_logprobs=tuple(TokenLogprobs(logprob=value) for value in values),
        )

    async def batches(self, *scripts):
        cluster = Cluster(*scripts)
        asked = job()
        asked = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=True))
        async with cluster.backend.open(asked) as stream:
            found = [batch async for batch in stream]
        assert [i for batch in found for i in batch.token_ids] == ANSWER
        return found, cluster.decodes

    async def test_an_attempt_that_is_lost_takes_its_pieces_along(self):
        half = [self.pieces(-1.0), lost(1)]
        whole = [self.pieces(-1.0), self.pieces(-2.0), 10, StopReason.LENGTH]
        found, decodes = await self.batches(half, whole)
        assert [each.logprob for each in found[0].prompt_logprobs] == [-1.0, -2.0]
        assert all(not batch.prompt_logprobs for batch in found[1:])
        assert [start.sampling.prompt_logprobs for start in decodes.started] == [True, True]

    async def test_behind_the_first_token_nobody_is_asked_for_them_again(self):
        first = [self.pieces(-1.0, -2.0), 4, lost(1)]
        found, decodes = await self.batches(first, [6, StopReason.LENGTH])
        told = [each.logprob for batch in found for each in batch.prompt_logprobs]
        assert told == [-1.0, -2.0]
        assert [start.sampling.prompt_logprobs for start in decodes.started] == [True, False]
