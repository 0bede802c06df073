"""Charges a request to its caller's quotas: as it comes, as it is queued, and as it is answered.

A request counts as soon as it is asked, valid or not. Its prompt is paid before it is queued, and
given back where the cluster fails it before its first token. Completion tokens are paid as they
come; those behind a stop string were computed and count here, although the answer leaves them out.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.errors import status_of
from core.messages import StopReason
from gateway.backend import TokenBatch, TokenStream
from gateway.limits import Allowance, MemoryQuotas, Quota, QuotaStore, Resource
from gateway.request_record import RequestRecord

_SERVER_FAULT = 500


class Meter:
    """Every request's charges, against the buckets of one store."""

    def __init__(self, store: QuotaStore | None = None) -> None:
        self._store = store or MemoryQuotas()

    async def request(self, record: RequestRecord) -> None:
        """Counts one request. Raises RateLimited."""
        if quotas := record.caller.quotas_of(Resource.REQUESTS):
            left = await self._store.take(quotas, 1)
            record.allowances = (_tightest(left),)

    @asynccontextmanager
    async def prompt(self, record: RequestRecord, num_tokens: int) -> AsyncIterator["Charge"]:
        """Pays for a prompt, around all that is done with it. Raises RateLimited."""
        record.prompt_tokens = num_tokens
        quotas = record.caller.quotas_of(Resource.TOKENS)
        charge = Charge(self._store, quotas)
        if quotas:
            left = await self._store.take(quotas, num_tokens)
            record.allowances += (_tightest(left),)
        try:
            yield charge
        except Exception as error:
            if quotas and not charge.begun and status_of(error).http >= _SERVER_FAULT:
                self._store.spend(quotas, -num_tokens)
            raise


class Charge:
    """The account of one answer."""

    def __init__(self, store: QuotaStore, quotas: tuple[Quota, ...]) -> None:
        self._store = store
        self._quotas = quotas
        self.begun = False

    def metered(self, stream: TokenStream) -> TokenStream:
        """The same stream, each batch paid as it comes."""
        return _Metered(stream, self) if self._quotas else stream

    def pay(self, num_tokens: int) -> None:
        self.begun = True
        self._store.spend(self._quotas, num_tokens)


class _Metered:
    """Implements TokenStream over another one."""

    def __init__(self, stream: TokenStream, charge: Charge) -> None:
        self._stream = stream
        self._charge = charge

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        async for batch in self._stream:
            self._charge.pay(len(batch.token_ids))
            yield batch

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        self._stream.stop(reason, choice)


def _tightest(allowances: tuple[Allowance, ...]) -> Allowance:
    return min(allowances, key=lambda each: each.remaining)
