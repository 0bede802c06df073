"""Checks grammars before their requests queue, off the event loop and within a time."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.errors import InvalidGrammar, InvalidRequest
from core.grammar import check_grammar
from core.messages import Grammar
from gateway.inputs import GrammarInput

T = TypeVar("T")
_TIMEOUT_S = 2.0
_THREADS = 2
_REMEMBERED = 256


class GrammarCheck:
    """Remembers what was fine, so that a grammar in use costs nothing. Its threads end by `close`.

    A check that is given up keeps its thread until the library has come to an end.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._fine: OrderedDict[Grammar, None] = OrderedDict()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    async def make(self, field: str, make: Callable[[], Grammar]) -> Grammar:
        """A grammar whose making takes time, made on a thread; raises what `make` raises."""
        return await self._in_time(field, make)

    async def check(self, asked: GrammarInput) -> None:
        """Raises InvalidRequest that names the field: too large, too slow, or the library's words.

        Which means: not valid, not satisfiable, or with a keyword that cannot be held.
        """
        grammar = asked.grammar
        if grammar in self._fine:
            self._fine.move_to_end(grammar)
            return
        size = len(grammar.text.encode())
        if size > self._max_bytes:
            raise InvalidRequest(
                f"has {size} bytes; at most {self._max_bytes} are taken", field=asked.field
            )
        try:
            await self._in_time(asked.field, lambda: check_grammar(grammar))
        except InvalidGrammar as error:
            raise InvalidGrammar(error.message, field=error.field or asked.field) from None
        self._fine[grammar] = None
        while len(self._fine) > _REMEMBERED:
            self._fine.popitem(last=False)

    def close(self) -> None:
        """Begins no check any more; one that runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_time(self, field: str, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            raise InvalidGrammar(
                f"takes longer than {_TIMEOUT_S:g} s to check", field=field
            ) from None
