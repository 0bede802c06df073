"""Watches one request from its arrival to its end, for the metrics."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from core.messages import StopReason
from gateway.backend import TokenBatch, TokenStream
from gateway.ledger import Ledger
from gateway.outcome import answered, outcome_of
from gateway.request_metrics import RequestMetrics
from gateway.request_record import RequestRecord


class RequestWatch:
    """Takes down what comes of one request."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._num_choices = 1
        self._going = 1
        self._num_tokens = 0
        # When the last token of each choice came.
        self._last_s: dict[int, float] = {}
        self._stop_reason: StopReason | None = None

    def asked(self, num_prompt_tokens: int, max_new_tokens: int, num_choices: int) -> None:
        """It is valid, and about to be queued."""
        self._num_choices = self._going = num_choices
        self._metrics.asked(num_prompt_tokens, max_new_tokens, num_choices)

    def observed(self, stream: TokenStream, num_prompt_tokens: int) -> TokenStream:
        """The same stream, each batch noted as it comes."""
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        return _Observed(stream, self)

    def took(self, batch: TokenBatch) -> None:
        """A batch came. Tokens that came together are taken to have come evenly."""
        num_tokens = len(batch.token_ids)
        if num_tokens:
            now_s = time.monotonic()
            if (last_s := self._last_s.get(batch.choice)) is not None:
                self._metrics.inter_token_s.observe((now_s - last_s) / num_tokens, num_tokens)
            elif batch.cached_tokens:
                self._metrics.cached_tokens.inc(batch.cached_tokens)
            self._last_s[batch.choice] = now_s
            self._num_tokens += num_tokens
            self._metrics.generation_tokens.inc(num_tokens)
        if batch.stop_reason is not None:
            self.stopped(batch.stop_reason, 1)

    def stopped(self, reason: StopReason, num_choices: int | None) -> None:
        """So many answers are over; None: all that went on."""
        self._going = self._going - num_choices if num_choices is not None else 0
        self._stop_reason = reason

    def ended(
        self, operation: str, record: RequestRecord, ledger: Ledger, error: BaseException | None
    ) -> None:
        """The request is over, by this error if any."""
        timing = ledger.close()
        if error is None and self._going <= 0 and self._stop_reason is not None:
            outcome = answered(self._stop_reason)
        else:
            outcome = outcome_of(error or GeneratorExit(), own_deadline=record.own_deadline)
        record.outcome = outcome
        self._metrics.ended(
            operation,
            outcome,
            timing,
            duration_s=timing.total_s,
            num_tokens=self._num_tokens,
            num_choices=self._num_choices,
        )


@contextmanager
def watched(
    metrics: RequestMetrics, operation: str, record: RequestRecord, ledger: Ledger
) -> Iterator[RequestWatch]:
    """Watches the request that is served inside the block, however it ends."""
    watch = RequestWatch(metrics)
    error: BaseException | None = None
    metrics.in_flight.inc()
    try:
        yield watch
    except BaseException as ended_by:
        error = ended_by
        raise
    finally:
        metrics.in_flight.dec()
        watch.ended(operation, record, ledger, error)


class _Observed:
    """Implements TokenStream over another one."""

    def __init__(self, stream: TokenStream, watch: RequestWatch) -> None:
        self._stream = stream
        self._watch = watch

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        async for batch in self._stream:
            self._watch.took(batch)
            yield batch

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        self._watch.stopped(reason, None if choice is None else 1)
        self._stream.stop(reason, choice)
