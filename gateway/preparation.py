"""Renders and tokenises off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.errors import DeadlineExceeded
from gateway.inputs import ChatInput
from gateway.ledger import Ledger
from gateway.template import RENDER_TIMEOUT_S, ChatTemplate, render_timeout
from gateway.tokenizer import PromptTokenizer
from gateway.validation import Limits, too_long

T = TypeVar("T")
_THREADS = 2


class Preparation:
    """Makes token ids of prompts, in threads of its own.

    Rendering is given up after RENDER_TIMEOUT_S, in which its thread ends it as well, tokenising at
    the request's deadline; the thread of a call that was given up comes back when the call ends.
    Rendering and tokenising have separate threads, so that neither waits for the other.
    """

    def __init__(self, tokenizer: PromptTokenizer, template: ChatTemplate, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._renderers = ThreadPoolExecutor(_THREADS, thread_name_prefix="render")
        self._tokenisers = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    async def chat(self, request: ChatInput, ledger: Ledger, remaining_s: float) -> tuple[int, ...]:
        """The prompt of a conversation. Raises InvalidRequest or DeadlineExceeded."""
        messages, tools = request.messages, request.tools.offered
        try:
            async with asyncio.timeout(min(RENDER_TIMEOUT_S, remaining_s)):
                rendered = await self._in(
                    self._renderers, lambda: self._template.render(messages, tools)
                )
        except TimeoutError:
            if remaining_s < RENDER_TIMEOUT_S:
                raise DeadlineExceeded("the request's time ran out") from None
            raise render_timeout() from None
        ledger.rendered()
        self._check_size("messages", rendered)
        return await self._tokenise(
            lambda: self._tokenizer.encode_rendered(rendered), ledger, remaining_s
        )

    async def completion(
        self, prompt: str | tuple[int, ...], ledger: Ledger, remaining_s: float
    ) -> tuple[int, ...]:
        """The prompt of a completion: token ids stay as they are."""
        if not isinstance(prompt, str):
            return prompt
        self._check_size("prompt", prompt)
        return await self._tokenise(
            lambda: self._tokenizer.encode_prompt(prompt), ledger, remaining_s
        )

    def close(self) -> None:
        """Starts no call any more; a call that runs is not waited for."""
        for pool in (self._renderers, self._tokenisers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, field: str, text: str) -> None:
        """Turns text away that cannot fit, before time is spent on it."""
        fewest = self._tokenizer.at_least(len(text))
        if fewest > self._limits.longest_prompt:
            raise too_long(field, fewest, self._limits, exact=False)

    async def _tokenise(
        self, encode: Callable[[], tuple[int, ...]], ledger: Ledger, remaining_s: float
    ) -> tuple[int, ...]:
        try:
            async with asyncio.timeout(remaining_s):
                ids = await self._in(self._tokenisers, encode)
        except TimeoutError:
            raise DeadlineExceeded("the request's time ran out") from None
        ledger.tokenised()
        return ids

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)
