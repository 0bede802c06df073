"""One request in the cluster: placed, handed over, decoded; retried here and nowhere else.

An attempt that fails gets another placement, without the workers that were lost, and goes on
behind the tokens that the client has: the next attempt is given prompt and answer so far, and since
a token depends on its position and not on the worker, the client sees one gapless stream of the
same tokens. At most twice, within the gateway's retry budget and the request's deadline; a request
that cost two workers fails, and its prompt is refused for a while.

A worker that has no room after all, since the answers beside it grew, has lost nothing: the request
queues again, after a pause in which the scheduler hears of it, and that is no retry. Nor is it one
where a worker turns to another role or leaves, and gives up what runs there: nothing is lost.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog

from core.block_hash import BlockHasher, short
from core.config import GatewayConfig
from core.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Incompatible,
    Moved,
    Overloaded,
    StaleLeader,
    TandemError,
    Unavailable,
    WorkerLost,
    from_failure,
    to_failure,
)
from core.messages import (
    Ended,
    Enqueue,
    KeepTrace,
    Placement,
    SamplingParams,
    Start,
    StopReason,
    Ticket,
    TokenLogprobs,
    Tokens,
    TransferId,
)
from gateway.attempts import Attempts
from gateway.backend import Job, TokenBatch, TokenStream
from gateway.decode_link import DecodeLink, DecodeLinks, DecodeStream
from gateway.progress import Progress
from gateway.request_record import current
from gateway.retries import Poison, RetryBudget
from gateway.scheduler_link import SchedulerLink

MAX_RETRIES = 2
MAX_LOST_WORKERS = 1  # the second one fails the request
MAX_DATA_LOSSES = 1
MAX_REFUSALS = 5
MAX_MOVES = 16
# Of a prompt, the blocks that the scheduler is told of.
MAX_HASHED_BLOCKS = 256
# Before the first of them; each next pause is twice as long. Together they outlast the reports of
# some seconds, after which the scheduler lets the request wait instead of placing it.
_REFUSED_PAUSE_S = 0.1
_MOVED_PAUSE_S = 0.05
_RETRYABLE = (Unavailable, Overloaded, DataLoss, Incompatible)
# The decode worker keeps the deadline; where it is silent past it, it is taken for lost.
_GRACE_S = 2.0
_FINISHED = frozenset({StopReason.EOS, StopReason.STOP_SEQUENCE, StopReason.LENGTH})


class ClusterBackend:
    """Runs jobs on the cluster. Implements `gateway.backend.Backend`."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        decodes: DecodeLinks,
        config: GatewayConfig,
        *,
        hasher: BlockHasher | None = None,
    ) -> None:
        """`hasher` names blocks as the workers' prefix caches do; None where there are none."""
        self.scheduler = scheduler
        self.decodes = decodes
        self._hasher = hasher
        self.budget = RetryBudget(config.retry_budget_ratio, config.retry_budget_floor)
        self.poison = Poison(config.quarantine_s)
        # Attempts that were tried again by error code, and requests that queued again.
        self.num_retries: Counter[str] = Counter()
        self.num_requeues = 0
        self.num_moves = 0
        self._sessions: set[Session] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def block_hashes(self, token_ids: Sequence[int], cache_salt: str) -> tuple[int, ...]:
        """By what the scheduler finds the first blocks of tokens in the workers' prefix caches."""
        if self._hasher is None:
            return ()
        most = MAX_HASHED_BLOCKS * self._hasher.block_size
        # A cache never gives the block with the last token: something must be computed.
        chain = self._hasher.chain(token_ids[:-1][:most], cache_salt)
        return tuple(map(short, chain))

    @asynccontextmanager
    async def open(self, job: Job) -> AsyncIterator[TokenStream]:
        """See Backend.open. Entered once the first tokens are there."""
        session = Session(job, self)
        self._sessions.add(session)
        self._none_left.clear()
        try:
            await session.begin()
            yield session
        except Exception as error:
            session.attempts.failed(to_failure(error).code)
            raise
        finally:
            session.leave()
            self._sessions.discard(session)
            if not self._sessions:
                self._none_left.set()

    async def drain(self, timeout_s: float) -> None:
        """Lets running requests end; those that outlast the time fail with Unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
                return
        stopping = Unavailable("the server is stopping")
        self.scheduler.give_up(stopping)
        for session in self._sessions:
            session.give_up(stopping)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._none_left.wait()


class Session:
    """The life of one job across its attempts."""

    def __init__(self, job: Job, cluster: ClusterBackend) -> None:
        self._job = job
        self._cluster = cluster
        self._deadline_s = time.monotonic() + job.remaining_s
        self._attempt = 0
        self._retries = 0
        self._refusals = 0
        self._moves = 0
        self._pause_s = 0.0
        self._lost_workers: list[str] = []
        # What the present attempt has told of the prompt's log probabilities.
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._data_losses = 0
        self.attempts = Attempts(job.trace, waterfall=current().waterfall)
        self._link: DecodeLink | None = None
        # The present attempt's tokens; None between two attempts.
        self._stream: DecodeStream | None = None
        self._ticket: Ticket | None = None
        self._begun = False  # the present attempt has brought tokens
        self._failed: Ended | None = None
        self._progress = Progress(job.num_choices, job.sent)
        # What came and was not taken yet.
        self._ready: deque[TokenBatch] = deque()
        self._stop_reason = StopReason.CANCELLED
        self._over = False
        self._given_up: TandemError | None = None
        self._log = structlog.get_logger()

    @property
    def _transfer(self) -> TransferId:
        return TransferId(request_id=self._job.request_id, attempt=self._attempt)

    async def begin(self) -> None:
        """Returns with the first tokens. Raises the last attempt's error where none succeeds."""
        refused_s = self._cluster.poison.remaining_s(
            self._job.model, self._job.cache_salt, self._job.prompt_token_ids
        )
        if refused_s > 0:
            raise Overloaded(
                f"this prompt cost {MAX_LOST_WORKERS + 1} workers; retry in {refused_s:.0f} s",
                retry_after_s=refused_s,
            )
        self._cluster.budget.request()
        self._job.trace.on_keep(self._keep_in_scheduler)
        await self._more()

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        while self._ready or not self._over:
            if self._ready:
                yield self._ready.popleft()
            else:
                await self._more()

    def give_up(self, error: TandemError) -> None:
        """Ends the request with an error that is not tried again."""
        self._given_up = error
        if self._stream is not None:
            self._stream.put(
                Ended(transfer=self._transfer, reason=StopReason.ERROR, failure=to_failure(error))
            )

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        """See TokenStream.stop."""
        self._ready = deque(each for each in self._ready if choice not in (None, each.choice))
        if choice is not None:
            self._progress.end(choice)
        if choice is not None and self._progress.goes_on:
            if self._link is not None:
                self._link.cancel(self._transfer, reason, (choice,))
        else:
            self._stop_reason = reason
            self.leave()

    def leave(self) -> None:
        """Cancels what still runs. The decode worker's answer settles the placement."""
        if self._link is not None and not self._over:
            self._link.cancel(self._transfer, self._stop_reason)
        self._over = True
        self.attempts.end()

    async def _more(self) -> None:
        """Until something is ready, by another attempt if need be.

        Raises where the request failed.
        """
        while not (self._ready or self._over):
            if self._stream is None:
                self._stream = await self._place()
            try:
                tokens, ended = await self._receive(self._stream)
            except TandemError as error:
                self._fail_or_retry(error)
                continue
            self._begun = True
            self._take(tokens, ended)

    def _take(self, tokens: tuple[Tokens, ...], ended: Ended | None) -> None:
        for each in tokens:
            self._prompt_logprobs += each.prompt_logprobs
        tokens = tuple(each for each in tokens if each.token_ids)
        news = None if self._progress.begun else next((t for t in tokens if t.timing), None)
        for batch in self._progress.take(tokens, ended.reason if ended is not None else None):
            if news is not None:
                assert news.timing is not None
                batch = replace(
                    batch,
                    waits=self.attempts.arrived(news.timing),
                    timing=news.timing,
                    cached_tokens=news.cached_tokens,
                    prompt_logprobs=tuple(self._prompt_logprobs),
                )
                self._prompt_logprobs = []
                news = None
            self._ready.append(batch)
        self._over = not self._progress.goes_on

    def _fail_or_retry(self, error: TandemError) -> None:
        """Readies the next attempt, or raises the error where there is to be none."""
        self.attempts.failed(error.code)
        if self._given_up is not None:
            raise self._given_up
        if isinstance(error, WorkerLost):
            self._lost_workers.append(str(error.culprit))
            if len(self._lost_workers) > MAX_LOST_WORKERS:
                self._cluster.poison.add(
                    self._job.model, self._job.cache_salt, self._job.prompt_token_ids
                )
                raise error
        if isinstance(error, DataLoss):
            self._data_losses += 1
        if isinstance(error, StaleLeader):
            self._cluster.scheduler.refused_as_stale(self._ticket)
        if isinstance(error, Moved):
            self._moved(error)
        elif isinstance(error, Overloaded | StaleLeader) and not self._begun:
            self._refused(error)
        elif (
            not isinstance(error, _RETRYABLE)
            or self._retries >= MAX_RETRIES
            or self._data_losses > MAX_DATA_LOSSES
            or not self._cluster.budget.take()
        ):
            raise error
        else:
            self._retries += 1
            self._cluster.num_retries[error.code] += 1
            self._log.warning(
                "retrying",
                request=str(self._transfer),
                code=error.code,
                why=error.message,
                tokens_sent=self._progress.num_sent,
            )
        self._link = self._stream = self._failed = None

    def _moved(self, error: Moved) -> None:
        """Its worker gave it up. One that did so on arrival may not have told the scheduler yet."""
        if self._moves >= MAX_MOVES:
            raise error
        self._moves += 1
        if not self._begun:
            self._pause_s = _MOVED_PAUSE_S
        self._cluster.num_moves += 1
        self._log.info(
            "moving",
            request=str(self._transfer),
            why=error.message,
            tokens_sent=self._progress.num_sent,
        )

    def _refused(self, error: Overloaded | StaleLeader) -> None:
        """The worker had no room, or has another leader than we had: it has lost nothing.

        So the retry budget is for others.
        """
        if self._refusals >= MAX_REFUSALS:
            raise error
        self._pause_s = _REFUSED_PAUSE_S * 2**self._refusals
        self._refusals += 1
        self._cluster.num_requeues += 1
        self._log.info("queueing_again", request=str(self._transfer), why=error.message)

    async def _place(self) -> DecodeStream:
        """A new attempt: a placement from the scheduler, and the Start to its decode worker."""
        if self._pause_s > 0:
            await self._pause()
        self._attempt += 1
        self._begun = False
        self._prompt_logprobs = []
        self.attempts.begin(self._attempt, num_sent=self._progress.num_sent)
        placement = await self._cluster.scheduler.place(self._enqueue())
        current().explanation = placement.explanation
        self.attempts.placed(placement)
        self._ticket = placement.ticket
        self._link = self._cluster.decodes.get(placement.decode)
        self._job.trace.on_keep(partial(self._link.keep_trace, self._job.request_id))
        return self._link.start(self._start(placement))

    def _keep_in_scheduler(self) -> None:
        self._cluster.scheduler.keep_trace(KeepTrace(request_id=self._job.request_id))

    async def _pause(self) -> None:
        """Lets the scheduler hear from the worker that had no room."""
        pause_s, self._pause_s = self._pause_s, 0.0
        began_s = time.monotonic()
        await asyncio.sleep(min(pause_s, self._remaining_s()))
        self.attempts.paused(time.monotonic() - began_s)
        if self._given_up is not None:
            raise self._given_up

    def _enqueue(self) -> Enqueue:
        branches = self._progress.branches()
        known = len(branches[0].sent_token_ids)
        read = self._job.prompt_token_ids + branches[0].sent_token_ids
        scored = self._sampling().prompt_logprobs  # computed whole, whatever caches hold
        return Enqueue(
            transfer=self._transfer,
            model=self._job.model,
            prompt_tokens=len(self._job.prompt_token_ids) + known,
            max_new_tokens=self._job.sampling.max_new_tokens - known,
            num_choices=len(branches),
            remaining_s=self._remaining_s(),
            excluded_workers=tuple(self._lost_workers),
            tenant=self._job.cache_salt,
            priority=self._job.priority,
            block_hashes=() if scored else self._cluster.block_hashes(read, self._job.cache_salt),
            explain=current().explain,
            trace_context=self.attempts.trace_context,
        )

    def _start(self, placement: Placement) -> Start:
        return Start(
            transfer=self._transfer,
            decode=placement.decode.worker,
            prefill=placement.prefill,
            prompt_token_ids=self._job.prompt_token_ids,
            branches=self._progress.branches(),
            sampling=self._sampling(),
            remaining_s=self._remaining_s(),
            ticket=placement.ticket,
            cache_salt=self._job.cache_salt,
            trace_context=self.attempts.trace_context,
        )

    def _sampling(self) -> SamplingParams:
        """With the first token the client has been told of the prompt: not once more."""
        sampling = self._job.sampling
        return replace(sampling, prompt_logprobs=False) if self._progress.begun else sampling

    def _remaining_s(self) -> float:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed")
        return remaining_s

    async def _receive(self, stream: DecodeStream) -> tuple[tuple[Tokens, ...], Ended | None]:
        """What the worker says next. Raises where the attempt failed."""
        assert self._link is not None
        if self._failed is not None:
            raise _error_of(self._failed)
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic() + _GRACE_S):
                tokens, ended = await stream.next()
        except TimeoutError:
            worker = self._link.endpoint.worker
            raise DeadlineExceeded(f"{worker} kept silent past the deadline") from None
        if any(each.timing is not None for each in tokens):
            self._cluster.scheduler.prefilled(self._transfer)
        if ended is not None and ended.reason not in _FINISHED:
            if not tokens:
                raise _error_of(ended)
            self._failed, ended = ended, None  # first the tokens that came before it
        return tokens, ended


def _error_of(ended: Ended) -> TandemError:
    if ended.failure is not None:
        return from_failure(ended.failure)
    if ended.reason is StopReason.TIMEOUT:
        return DeadlineExceeded("the deadline passed")
    if ended.reason is StopReason.CANCELLED:
        return Cancelled("the request was cancelled")
    return Unavailable("the request ended without a reason")
