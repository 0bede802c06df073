"""The seam between the API and the cluster.

HTTP and gRPC front ends turn a client's request into a `Job` and read token batches from a stream;
they know nothing of schedulers and workers. `gateway.session` implements this over the cluster.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from core.messages import Branch, HandoffTiming, SamplingParams, StopReason, TokenLogprobs
from core.telemetry.trace import NO_TRACE, RequestTrace
from gateway.attempts import NO_WAITS, Waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One generation, validated and tokenised."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    # What is left of the deadline, in seconds.
    remaining_s: float
    # Whose prefix-cache entries may be shared: the tenant's; "" where nobody is asked for a key.
    cache_salt: str = ""
    # Answers to the one prompt.
    num_choices: int = 1
    # The lower, the earlier.
    priority: int = 0
    # Of an answer that is taken up again: the choices that go on, and what there is of them.
    sent: tuple[Branch, ...] | None = field(default=None, repr=False)
    trace: RequestTrace = field(default=NO_TRACE, repr=False)


@dataclass(slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one choice that arrived together. The last batch of a choice has a stop reason.

    The first batch also says what the request waited for, how its hand-off went and how many of its
    prompt tokens came from a prefix cache. Not frozen for the same reason as TextEvent.
    """

    token_ids: tuple[int, ...]
    stop_reason: StopReason | None = None
    waits: Waits = NO_WAITS
    timing: HandoffTiming | None = None
    cached_tokens: int = 0
    choice: int = 0
    # One for each token where the job asked for them, else none.
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    # With the first batch, where the job asked for them: one for each prompt token but the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)


class TokenStream(Protocol):
    """The tokens of one job, in order. Iteration ends when every choice has had a stop reason.

    Raises a TandemError from iteration where the job failed.
    """

    def __aiter__(self) -> AsyncIterator[TokenBatch]: ...

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        """Ends the job, or one choice of it, early for this reason (a stop string matched).

        No more batches come of what was ended.
        """
        ...


class Backend(Protocol):
    """Whatever runs jobs."""

    def open(self, job: Job) -> AbstractAsyncContextManager[TokenStream]:
        """Starts a job. Leaving the context before its end cancels it and frees what it holds.

        Entering raises Overloaded, Unavailable or DeadlineExceeded where the job is refused before
        its first token.
        """
        ...
