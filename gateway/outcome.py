"""How one request ended, in few words."""

import asyncio
import enum
from dataclasses import dataclass

from core.errors import Cancelled, DeadlineExceeded, SlowReader, status_of, to_failure
from core.messages import StopReason

_SERVER_FAULT = 500


class OutcomeKind(enum.StrEnum):
    """Whose doing the end was."""

    ANSWERED = "answered"
    # The client's: a bad request, a quota, an answer that it did not read.
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    # Ours.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason` is a stop reason of an answer, else an error's code: one of a few dozen words."""

    kind: OutcomeKind
    reason: str
    is_servers_fault: bool = False


def answered(reason: StopReason) -> Outcome:
    """An answer came to its end."""
    return Outcome(OutcomeKind.ANSWERED, reason.name.lower())


def outcome_of(error: BaseException, *, own_deadline: bool) -> Outcome:
    """What an exception says of a request that it ended.

    A deadline that the client chose is the client's own; ours has to suffice.
    """
    if isinstance(error, Cancelled | asyncio.CancelledError | GeneratorExit):
        return Outcome(OutcomeKind.CANCELLED, Cancelled.code)
    code = to_failure(error).code
    if isinstance(error, DeadlineExceeded):
        return Outcome(OutcomeKind.TIMEOUT, code, is_servers_fault=not own_deadline)
    if isinstance(error, SlowReader) or status_of(error).http < _SERVER_FAULT:
        return Outcome(OutcomeKind.REFUSED, code)
    return Outcome(OutcomeKind.FAILED, code, is_servers_fault=True)
