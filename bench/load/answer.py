"""Which tokens came when: the account of one streamed answer."""

import json
from collections.abc import Mapping
from typing import Any

from bench.load.request import Failure

_DONE = b"[DONE]"
# Where chat answers carry text. Models that think aloud send that under a name of its own.
_TEXTS = ("content", "reasoning_content", "reasoning")


class Answer:
    """Takes events as they come; afterwards tells times and counts.

    An event may carry several tokens. How many it does is taken from what it says: a running
    `usage`, or its `token_ids`. One that says neither carries some where it carries text, and
    nothing else: a role, a finish reason, half of a character. The number of all tokens is the
    last `usage`'s; without one, what the events told, each counting at least one.
    """

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.failure: Failure | None = None
        self.done = False
        self._told_by_usage: int | None = None
        self._told_by_events = 0

    @property
    def completion_tokens(self) -> int:
        return self._told_by_events if self._told_by_usage is None else self._told_by_usage

    def take(self, data: bytes, at_s: float) -> None:
        """One event's data, and when it arrived."""
        if data == _DONE:
            self.done = True
            return
        try:
            event = json.loads(data)
            if event.get("error") is not None:
                self._fail("error_event", complaint(event, "the server sent an error"))
                return
            self._count(event, at_s)
        except (ValueError, TypeError, AttributeError, LookupError):
            self._fail("not_this_api", "an event is not what the OpenAI API sends")

    def close(self) -> None:
        """The response has ended: what is missing is an error."""
        if not self.done:
            self._fail("broken_off", "the stream ended before its [DONE]")
        elif not self.token_times_s:
            self._fail("no_tokens", "the answer has no tokens")

    def _fail(self, kind: str, detail: str) -> None:
        if self.failure is None:  # what follows an error is its consequence
            self.failure = Failure(kind=kind, detail=detail)

    def _count(self, event: Mapping[str, Any], at_s: float) -> None:
        tokens = _tokens(event)
        usage = event.get("usage")
        if usage is not None:
            before = self.completion_tokens
            self._told_by_usage = int(usage["completion_tokens"])
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if tokens or _goes_on(event):  # this is the count so far
                tokens = self._told_by_usage - before
        if tokens:
            self._told_by_events += tokens
            self.token_times_s.append(at_s)


def _tokens(event: Mapping[str, Any]) -> int:
    """How many tokens it tells of, or 1 where all it has is text."""
    choices = event.get("choices")
    if not choices:
        return 0
    choice = choices[0]
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        return len(token_ids)
    delta = choice.get("delta") or {}
    return int(bool(choice.get("text") or any(delta.get(name) for name in _TEXTS)))


def _goes_on(event: Mapping[str, Any]) -> bool:
    choices = event.get("choices") or []
    return bool(choices) and choices[0].get("finish_reason") is None


def complaint(body: Any, otherwise: str) -> str:
    """What a server says is wrong, from OpenAI's error shape or one near it, in one line."""
    error = body.get("error", body) if isinstance(body, Mapping) else None
    said = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(said.split()) if isinstance(said, str) and said.strip() else otherwise
