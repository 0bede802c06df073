"""Tokens without an engine: one for every open stream at each tick, as an engine's step gives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.messages import StopReason
from gateway.backend import Job, TokenBatch


class ScriptedSource:
    """Implements `gateway.backend.Backend`. Every job says the same tokens, over and over.

    A job's first token is there at once; the next ones come with the ticks.
    """

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        # Made beforehand: what the source itself costs is no cost of the gateway.
        self._batches = [TokenBatch(token_ids=(token_id,)) for token_id in token_ids]
        self._news = asyncio.Event()
        self.num_batches = 0

    def tick(self) -> None:
        """Gives every stream its next token."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    @asynccontextmanager
    async def open(self, job: Job) -> AsyncIterator["ScriptedStream"]:
        """See Backend.open."""
        yield ScriptedStream(self, job.sampling.max_new_tokens)

    async def batches(self, max_tokens: int) -> AsyncIterator[TokenBatch]:
        """One stream's tokens."""
        for i in range(max_tokens - 1):
            self.num_batches += 1
            yield self._batches[i % len(self._batches)]
            await self._news.wait()
        yield TokenBatch(token_ids=(0,), stop_reason=StopReason.LENGTH)


class ScriptedStream:
    """See `gateway.backend.TokenStream`."""

    def __init__(self, source: ScriptedSource, max_tokens: int) -> None:
        self._source = source
        self._max_tokens = max_tokens

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self._source.batches(self._max_tokens)

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        """Nothing runs that would have to be stopped."""
