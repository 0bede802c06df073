"""The scheduling policy: a pure function of what is known.

`decide` looks at the cluster and the queue and says what happens now; `refuse_early` says whether a
request is to join the queue at all. The service and the simulator call these same functions; time
is an argument. Stable: their signatures, the decisions, and what `scheduler.view` says is.

The queue gives the order (`scheduler.order`). Admission is joint: a request leaves the queue only
when somebody has time to read its prompt *and* a decode worker has room for its answer;
`scheduler.choice` says who. Binding is late: while the best reader is busy, the request waits, so
that the order can still change. The head of the queue is overtaken only by those who take nothing
from it: while it waits for other workers than it was lost with; while its tenant has more than its
share, by guests, which are those of tenants that have not, and whose prompts workers read first
(`engine.turns`); and while it waits for a prefill worker, by those whose prompts decode workers
read sooner, with the head's own room kept. So nobody starves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice

from core.messages import Compatibility, Endpoint, Explanation, Failure, TransferId
from scheduler.choice import Choice, Slate
from scheduler.cost import answer_s
from scheduler.order import RequestQueue
from scheduler.view import ClusterView, Waiting, WorkerView

# Requests behind one that waits for a prefill worker which are looked at.
_LOOKAHEAD = 8
# Expectations are off by as much as this. Whom the doubt refuses others replace, while there are
# more than can be served; whom it let in too late would cost what others then lack.
_DOUBT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """One worker reads the prompt, and another decodes."""

    transfer: TransferId
    prefill: Endpoint
    decode: Endpoint
    explanation: Explanation | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The decode worker does both."""

    transfer: TransferId
    decode: Endpoint
    explanation: Explanation | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The request leaves the queue with an error. `retry_after_s` 0: when the queue has drained."""

    transfer: TransferId
    failure: Failure
    retry_after_s: float = 0.0


Decision = Disaggregated | Local | Reject


def decide(
    view: ClusterView, queue: RequestQueue | Sequence[Waiting], *, now_s: float
) -> list[Decision]:
    """What happens now to the requests of `queue`; one without a decision keeps waiting.

    A plain sequence is in the order of service. Neither is changed: whoever carries a decision out
    takes its request from the queue (`RequestQueue.remove`). Never places more than the view has
    free: blocks, sequences and backlog of earlier decisions of this call are counted.
    """
    decisions: list[Decision] = []
    slate = Slate(view, now_s)
    blocked = _serve(slate, _in_order(queue), decisions)
    if blocked and view.greedy:
        _serve(slate, _in_order(queue, view.greedy), decisions)
    for waiting in _expired(queue, now_s):
        failure = Failure(code="deadline_exceeded", message="the deadline passed in the queue")
        decisions.append(Reject(transfer=waiting.transfer, failure=failure))
    return decisions


def _expired(queue: RequestQueue | Sequence[Waiting], now_s: float) -> Iterable[Waiting]:
    if isinstance(queue, RequestQueue):
        return queue.expired(now_s)
    return (waiting for waiting in queue if waiting.deadline_s <= now_s)


def _in_order(
    queue: RequestQueue | Sequence[Waiting], without: frozenset[str] = frozenset()
) -> Iterator[Waiting]:
    if isinstance(queue, RequestQueue):
        return queue.in_order(without)
    return (waiting for waiting in queue if waiting.tenant not in without)


def _serve(slate: Slate, queue: Iterator[Waiting], decisions: list[Decision]) -> bool:
    """Decides on the queue from its head on, until one must wait.

    True where that one's tenant has more than its share already: guests may go on before it.
    """
    view, now_s = slate.view, slate.now_s
    decided = {decision.transfer for decision in decisions}
    for waiting in queue:
        if slate.num_left <= 0:
            return False
        if not slate.is_open_to(waiting):
            return waiting.tenant in view.greedy
        if waiting.deadline_s <= now_s or waiting.transfer in decided:
            continue
        if (reason := _never_fits(slate, waiting)) is not None:
            decisions.append(Reject(transfer=waiting.transfer, failure=reason))
            continue
        excluded = waiting.excluded if now_s < waiting.excluded_until_s else frozenset()
        choice = slate.choose(waiting, excluded)
        if choice is None:
            # What waits only for others to come back does not hold up those behind it.
            if excluded and slate.choose(waiting) is not None:
                continue
            return waiting.tenant in view.greedy
        if choice.waits:
            _read_elsewhere(slate, choice, waiting, queue, decisions)
            return waiting.tenant in view.greedy
        if is_late(view, waiting, choice.option.ttft_s, now_s):
            decisions.append(_too_late(waiting))
            continue
        decisions.append(_decision(choice, waiting))
        slate.charge(choice.option, waiting)
    return False


def _read_elsewhere(
    slate: Slate,
    head: Choice,
    waiting: Waiting,
    behind: Iterator[Waiting],
    decisions: list[Decision],
) -> None:
    """While the head waits for its prefill worker: who behind it is sooner read by a decode worker.

    What the head waits for is kept for it.
    """
    if not slate.prefill_speed or not slate.reader_speed:
        return
    decided = {decision.transfer for decision in decisions}
    slate.charge(head.option, waiting)
    if (glance := slate.glance(waiting)) is None:
        return
    pool = len(slate.prefills)
    # When a prefill worker would begin with the next one.
    begins_s = head.option.backlog_s + head.option.read_s / pool
    latest_s = begins_s + _LOOKAHEAD * head.option.read_s / pool + head.option.lateness_s
    if glance.base_s >= latest_s:  # most likely sooner for none of them
        return
    for each in islice(behind, _LOOKAHEAD):
        if slate.num_left <= 0:
            return
        if each.excluded or each.deadline_s <= slate.now_s or each.transfer in decided:
            continue
        reads_s = each.prompt_tokens / slate.prefill_speed
        split_s = begins_s + reads_s + head.option.lateness_s
        # All workers are looked at only for one that is likely to be placed.
        if glance.base_s + glance.token_s * each.prompt_tokens < split_s:
            if _never_fits(slate, each) is not None:
                continue
            choice = slate.choose_reader(each)
            if choice is None or choice.option.ttft_s + choice.option.lateness_s >= split_s:
                return
            decisions.append(_decision(choice, each, "read sooner than in its turn"))
            slate.charge(choice.option, each)
            if (glance := slate.glance(each)) is None:
                return
            continue
        begins_s += reads_s / pool


def _decision(choice: Choice, waiting: Waiting, reason: str = "") -> Decision:
    option, explanation = choice.option, choice.explanation(reason)
    if option.prefill is None:
        return Local(
            transfer=waiting.transfer, decode=option.decode.endpoint, explanation=explanation
        )
    return Disaggregated(
        transfer=waiting.transfer,
        prefill=option.prefill.endpoint,
        decode=option.decode.endpoint,
        explanation=explanation,
    )


def refuse_early(
    view: ClusterView, waiting: Waiting, *, ahead: float, now_s: float
) -> Reject | None:
    """Refuses a request whose deadline the queue alone will cost it; None where it may wait.

    `ahead` is what will be served before it, in units of cost (`RequestQueue.ahead_of`). What would
    be too late on an idle cluster too is not refused: it has the time that it brings. Nothing is
    refused before the queue's speed was measured, nor what has had a placement before.
    """
    if ahead <= 0 or view.drain_per_s <= 0 or waiting.transfer.attempt > 1:
        return None
    wait_s = ahead / view.drain_per_s
    first_s = fastest_reading_s(view, waiting)
    if not is_late(view, waiting, first_s, now_s + _DOUBT * wait_s):
        return None
    late_s = now_s + wait_s + first_s + answer_s(view, waiting) - waiting.deadline_s
    message = f"about {wait_s:.1f} s of work wait before it: its deadline cannot be met"
    return Reject(
        transfer=waiting.transfer,
        failure=Failure(code="overloaded", message=message),
        retry_after_s=max(1.0, late_s),
    )


def is_late(view: ClusterView, waiting: Waiting, ttft_s: float, now_s: float) -> bool:
    """Whether its wait until `now_s` has cost it the deadline: served at once, it had met it.

    True of the first token, or of the whole of an answer as long as answers are here. The doubt
    counts only for who had had time for it too: a deadline that is as near as the work is long is
    the client's own affair, and a moment in the queue did not cost it.
    """
    waited_s = now_s - waiting.enqueued_s
    if waiting.transfer.attempt > 1 or waited_s <= 0:
        return False
    left_s = waiting.deadline_s - now_s
    need_s = ttft_s + answer_s(view, waiting)
    return any(
        left_s < needed_s <= left_s + waited_s
        for expected_s in (ttft_s, need_s)
        for needed_s in (expected_s, _DOUBT * expected_s)
    )


def fastest_reading_s(view: ClusterView, waiting: Waiting) -> float:
    """Seconds in which the fastest idle worker would read the prompt; 0 where no speed is known."""
    fastest = max(view.measured.prefill_speed, view.measured.reader_speed)
    return waiting.prompt_tokens / fastest if fastest else 0.0


def _too_late(waiting: Waiting) -> Reject:
    failure = Failure(
        code="overloaded", message="it has waited for so long that its deadline cannot be met"
    )
    return Reject(transfer=waiting.transfer, failure=failure)


def _never_fits(slate: Slate, waiting: Waiting) -> Failure | None:
    """Why no worker that is there could ever take the request; None where one could.

    A decode worker must hold the longest answer, though it reserves less: alone on the worker, the
    request must come to its end.
    """
    tokens = waiting.prompt_tokens + waiting.max_new_tokens
    decodes, readers, prefills = slate.view.decodes, slate.readers, slate.pairing
    if decodes and not any(_holds(decode, tokens) for decode in decodes):
        return _too_long(tokens, "decode", decodes)
    if any(_holds(reader, tokens) for reader in readers):
        return None
    if prefills and not any(_holds(prefill, waiting.prompt_tokens) for prefill in prefills):
        return _too_long(waiting.prompt_tokens, "prefill", prefills)
    if not prefills and readers:
        return _too_long(tokens, "decode", readers)
    return None


def _holds(worker: WorkerView, tokens: int) -> bool:
    return worker.blocks_for(tokens) <= worker.num_blocks


def _too_long(tokens: int, what: str, workers: Sequence[WorkerView]) -> Failure:
    largest = max(worker.num_blocks * worker.compatibility.block_size for worker in workers)
    message = f"the request needs KV for {tokens} tokens; a {what} worker holds {largest}"
    return Failure(code="context_length_exceeded", message=message)


def not_ready(view: ClusterView) -> str | None:
    """Why no request at all can be placed on these workers; None where one could."""
    if view.readers:
        return None
    if not view.prefills and not view.decodes:
        return "no worker is ready"
    if not view.prefills:
        return "no prefill worker is ready"
    if not view.decodes:
        return "no decode worker is ready"
    if any(p.compatibility == d.compatibility for p in view.prefills for d in view.decodes):
        return None
    prefill, decode = view.prefills[0], view.decodes[0]
    differing = [
        f"{field.name} {getattr(prefill.compatibility, field.name)!r} and "
        f"{getattr(decode.compatibility, field.name)!r}"
        for field in fields(Compatibility)
        if getattr(prefill.compatibility, field.name) != getattr(decode.compatibility, field.name)
    ]
    return (
        f"no prefill and decode worker are compatible: {prefill.name} and {decode.name} have "
        + ", ".join(differing)
    )
