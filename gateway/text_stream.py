"""One request's answer as text, choice by choice, and a last word with the account."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from core.errors import Cancelled, DeadlineExceeded, Internal
from core.messages import StopReason
from gateway.backend import TokenStream
from gateway.bookmark import Bookmark
from gateway.choice_text import ChoiceText, TextEvent
from gateway.ledger import Ledger, Timing
from gateway.running import RunningRequest, cancelled

# The backend keeps the deadline; this much later the gateway stops believing that it will.
_OVERTIME_S = 2.0
_FINISHED = frozenset({StopReason.EOS, StopReason.STOP_SEQUENCE, StopReason.LENGTH})


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens. A token that ended the answer (end of sequence, stop token) counts as completion."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneEvent:
    """The last event of an answer: EOS, STOP_SEQUENCE or LENGTH. Anything else is an exception.

    With STOP_SEQUENCE, one of `stop` and `stop_token_id` says what ended the answer. Of several
    choices, this is the end of the one that ended last; each has its own in its last TextEvent.
    """

    stop_reason: StopReason
    usage: Usage
    timing: Timing
    stop: str | None = None
    stop_token_id: int | None = None


class TextStream:
    """The answer to one request, in one or several choices. Iterate it once.

    When a stop string matches, the choice is stopped, and with the last one the job. Raises
    DeadlineExceeded, Cancelled, Internal, or what the backend raises.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        stream: TokenStream,
        choices: Sequence[ChoiceText],
        ledger: Ledger,
        remaining_s: float,
        running: RunningRequest | None = None,
        bookmark: Bookmark | None = None,
    ) -> None:
        self.request_id = request_id
        # Where the answer can be taken up again.
        self.bookmark = bookmark
        self._running = running or RunningRequest(request_id)
        self.prompt_token_ids = prompt_token_ids
        self._stream = stream
        self._choices = choices
        self._ledger = ledger
        self._deadline_s = asyncio.get_running_loop().time() + remaining_s + _OVERTIME_S
        self._cached_tokens = 0

    async def __aiter__(self) -> AsyncIterator[TextEvent | DoneEvent]:
        batches = aiter(self._stream)
        going = len(self._choices)
        while going:
            try:
                with self._running.waiting(self._deadline_s):
                    batch = await anext(batches)
            except TimeoutError:
                raise self._running.timed_out() from None
            except StopAsyncIteration:
                raise self._broken_off() from None
            choice = self._choices[batch.choice]
            if choice.end is not None:  # stopped, with this batch on its way
                continue
            self._cached_tokens = self._cached_tokens or batch.cached_tokens
            self._ledger.arrived(batch)
            self._running.num_tokens += len(batch.token_ids)
            event = choice.take(batch)
            if event.end is not None:
                going -= 1
                if event.end.stop is not None:
                    self._stop(batch.choice, whole=not going)
            failed = event.end is not None and event.end.stop_reason not in _FINISHED
            if event.text or event.token_ids or not (failed or event.end is None):
                yield replace(event, end=None) if failed else event
                self._ledger.flushed()
            if failed and event.end is not None:
                _raise(event.end.stop_reason)
        assert event.end is not None
        yield DoneEvent(
            stop_reason=event.end.stop_reason,
            usage=self.usage,
            timing=self._ledger.close(),
            stop=event.end.stop,
            stop_token_id=event.end.stop_token_id,
        )

    def _stop(self, choice: int, *, whole: bool) -> None:
        """A stop string matched."""
        if whole:
            self._stream.stop(StopReason.STOP_SEQUENCE)
        else:
            self._stream.stop(StopReason.STOP_SEQUENCE, choice)

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self._cached_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
        )

    @property
    def stop_reasons(self) -> list[StopReason]:
        """How those choices ended that have."""
        return [choice.end.stop_reason for choice in self._choices if choice.end is not None]

    def _broken_off(self) -> Cancelled | Internal:
        """What the end of the tokens means before the end of the answer."""
        if self._running.cancelled:
            return cancelled()
        return Internal("the answer broke off without a reason")


def _raise(reason: StopReason) -> NoReturn:
    if reason is StopReason.TIMEOUT:
        raise DeadlineExceeded("the request's time ran out")
    if reason is StopReason.CANCELLED:
        raise cancelled()
    raise Internal("the answer could not be finished")
