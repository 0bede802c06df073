"""Holds answers to their grammars: compiles them off the step loop and tells what may come next.

A grammar is compiled once and kept; every sequence works on a copy of its own, which has consumed
the sequence's answer so far. That is all of its state, so a sequence that comes from elsewhere,
after a hand-off or a retry, replays its tokens into a fresh copy.

A mask depends on the tokens before it and not on logits, so it is made on a thread of its own while
the model computes. One that is not there in time makes its own row wait, and no other.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from core.errors import Internal, InvalidGrammar, TandemError, Unsupported
from core.grammar import grammar_source, limits, words
from core.messages import Grammar
from core.model_card import ModelCard

_CACHED_GRAMMARS = 64
_COMPILE_THREADS = 2
_MASK_THREADS = 2
# How long a step waits for masks once its logits are there. A late row is sampled in a later step.
_PATIENCE_S = 0.005
# The library's words for a token that a grammar does not allow.
_NOT_ALLOWED = "doesn't satisfy the grammar"
# And for a grammar that lets nothing come first, such as a schema that is nothing but itself.
_NOTHING_FIRST = "NoExtensionBias"
_TOO_SLOW = "the grammar is too complex: what may come next is not known within {limit_s:g} s"


class Matcher:
    """One answer under its grammar. One thread at a time calls it, between and within steps.

    `forbidden` is bool [vocab]: what must not come next after what was consumed.
    """

    def __init__(
        self, compiled: LLMatcher, vocab_size: int, pool: Executor, limit_s: float
    ) -> None:
        self._matcher = compiled
        self._vocab_size = vocab_size
        self._pool = pool
        self._limit_s = limit_s
        self._forbidden: Tensor | None = None
        self._coming: Future[Tensor] | None = None
        self._since_s = 0.0
        # Tokens of the answer that it knows of.
        self.num_consumed = 0

    @property
    def is_late(self) -> bool:
        """Whether a mask is still being made, so that its sequence had better wait."""
        return self._coming is not None and not self._coming.done()

    def replay(self, token_ids: Sequence[int]) -> None:
        """Consumes an answer's beginning and makes the mask behind it, here and now.

        Raises Internal where the grammar does not allow the tokens, InvalidGrammar where it is too
        complex.
        """
        self._forbidden = self._advance(tuple(token_ids))

    def begin(self, token_ids: Sequence[int]) -> None:
        """Starts to make the mask behind these further tokens of the answer."""
        if self._coming is None and (token_ids or self._forbidden is None):
            self._forbidden = None
            self._since_s = time.monotonic()
            self._coming = self._pool.submit(self._advance, tuple(token_ids))

    def mask(self, patience_s: float) -> Tensor | None:
        """What `begin` started, waited for this long; None where that was too short.

        Raises InvalidGrammar once it has taken longer than the limit, and what `replay` raises.
        """
        if self._coming is None:
            return self._forbidden
        try:
            self._forbidden = self._coming.result(max(0.0, patience_s))
        except TimeoutError:
            if time.monotonic() - self._since_s > self._limit_s:
                raise InvalidGrammar(_TOO_SLOW.format(limit_s=self._limit_s)) from None
            return None
        self._coming = None
        return self._forbidden

    def when_ready(self, call: Callable[[], None]) -> None:
        """Calls back, on any thread, once the mask that is late is there."""
        if self._coming is not None:
            self._coming.add_done_callback(lambda _: call())

    def _advance(self, token_ids: tuple[int, ...]) -> Tensor:
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise self._refused()
        self.num_consumed += len(token_ids)
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._refused()
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        if not allowed.any():
            raise InvalidGrammar("the grammar leads to where no token may follow")
        return torch.from_numpy(allowed == 0)

    def _refused(self) -> TandemError:
        """Why the library goes no further: a token that it forbids, or a limit of its own."""
        reason = words(self._matcher.get_error())
        if _NOT_ALLOWED in reason:
            return Internal("the answer left its grammar")
        return InvalidGrammar(f"the grammar is too complex: {reason}")


class Row(Protocol):
    """A row to sample, as far as its grammar goes."""

    @property
    def matcher(self) -> Matcher | None: ...

    @property
    def unseen_token_ids(self) -> tuple[int, ...]: ...


class Masks:
    """The masks of one step. They are made from here on, beside the model, until `collect`."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._num_rows = len(rows)
        self._matchers = {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None}
        self._ready: dict[int, Tensor] = {}
        # By row: what cannot go on.
        self.failures: dict[int, TandemError] = {}
        for i, matcher in self._matchers.items():
            matcher.begin(rows[i].unseen_token_ids)

    def collect(self) -> list[int]:
        """The rows that can be sampled. Waits a little for masks that are late, once for all."""
        if not self._matchers:
            return list(range(self._num_rows))
        deadline_s = time.monotonic() + _PATIENCE_S
        late: set[int] = set()
        for i, matcher in self._matchers.items():
            try:
                mask = matcher.mask(deadline_s - time.monotonic())
            except TandemError as error:
                self.failures[i] = error
                continue
            if mask is None:
                late.add(i)
            else:
                self._ready[i] = mask
        return [i for i in range(self._num_rows) if i not in late and i not in self.failures]

    def forbidden(self, rows: Sequence[int]) -> list[Tensor | None] | None:
        """The mask of each of these rows; None where no row has one."""
        return [self._ready.get(i) for i in rows] if self._ready else None


# Told on the event loop, exactly once.
Compiled = Callable[[Matcher | TandemError], None]


class GrammarCompiler:
    """Makes matchers for one model. Its threads end with `close`.

    The tokenizer's trie takes tenths of a second with the interpreter's lock held, so a compiler is
    made while its process loads.
    """

    def __init__(self, card: ModelCard, *, timeout_s: float) -> None:
        self._vocab_size = card.vocab_size
        self._timeout_s = timeout_s
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)
        self._compilers = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")
        self._maskers = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="mask")
        self._tokenizer = _tokenizer(card)

    def begin(self, grammar: Grammar, token_ids: Sequence[int], done: Compiled) -> None:
        """Compiles, replays the answer so far, and calls `done` on the loop within the timeout.

        A failure is InvalidGrammar (the grammar cannot be held), Unsupported (the tokenizer
        cannot), or Internal (the answer so far does not fit).
        """
        loop = asyncio.get_running_loop()
        work = self._compilers.submit(self._matcher, grammar, tuple(token_ids))
        told = asyncio.wrap_future(work, loop=loop)
        timer = loop.call_later(self._timeout_s, self._timed_out, told, done)
        told.add_done_callback(partial(self._tell, done, timer))

    def close(self) -> None:
        """Begins nothing more; what runs is not waited for."""
        for pool in (self._compilers, self._maskers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _timed_out(self, told: asyncio.Future[Matcher], done: Compiled) -> None:
        if told.cancel():
            done(InvalidGrammar(_TOO_SLOW.format(limit_s=self._timeout_s)))

    def _tell(
        self, done: Compiled, timer: asyncio.TimerHandle, told: asyncio.Future[Matcher]
    ) -> None:
        timer.cancel()
        if told.cancelled():
            return
        error = told.exception()
        if error is None:
            done(told.result())
        elif isinstance(error, TandemError):
            done(error)
        else:
            done(Internal(f"the grammar could not be compiled ({type(error).__name__})"))

    def _matcher(self, grammar: Grammar, token_ids: tuple[int, ...]) -> Matcher:
        """Runs on a thread of the compiler."""
        compiled = self._compiled(grammar).deep_copy()
        matcher = Matcher(compiled, self._vocab_size, self._maskers, self._timeout_s)
        matcher.replay(token_ids)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """The grammar before any token."""
        if self._tokenizer is None:
            raise Unsupported("this model's tokenizer cannot be held to a grammar")
        compiled = LLMatcher(self._tokenizer, grammar_source(grammar), log_level=0, limits=limits())
        if not compiled.is_error():
            compiled.compute_bitmask()  # what its copies need first, they share
        if compiled.is_error():
            reason = words(compiled.get_error())
            if reason.startswith(_NOTHING_FIRST):
                reason = "the grammar allows no answer: nothing may come first"
            raise InvalidGrammar(reason)
        return compiled


def _tokenizer(card: ModelCard) -> LLTokenizer | None:
    if not card.eos_token_ids:
        return None
    try:
        return LLTokenizer(
            str(card.tokenizer_path),
            n_vocab=card.vocab_size,
            eos_token=list(card.eos_token_ids),
        )
    except Exception:  # the library raises plain errors of several kinds
        return None
