"""What a load asks, and how each request went: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A prompt, as text or token ids, and how long the answer is to be.

    With `chat` the prompt is text, and the one message of a conversation.
    """

    prompt: str | tuple[int, ...] = field(repr=False)
    max_tokens: int
    chat: bool = False

    @property
    def path(self) -> str:
        """The route that takes it."""
        return CHAT if self.chat else COMPLETIONS

    def body(self, model: str, *, ignore_eos: bool) -> dict[str, Any]:
        """The JSON to send: greedy and streamed, with the usage at the end."""
        asked: Mapping[str, Any] = (
            {"messages": [{"role": "user", "content": self.prompt}]}
            if self.chat
            else {"prompt": self.prompt}
        )
        return {
            "model": model,
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Only where it is wanted: servers that follow OpenAI to the letter refuse the field.
            **({"ignore_eos": True} if ignore_eos else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no answer: a kind to count by, and what was said."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How one request went. Times are seconds after the load began, on one monotonic clock.

    `token_times_s` has one entry for each event that carried tokens, however many it carried.
    Prompt and cached tokens are None where the server does not tell.
    """

    intended_s: float
    sent_s: float
    token_times_s: tuple[float, ...]
    finished_s: float
    max_tokens: int
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float:
        """From when it was to be sent to its first token."""
        return self.token_times_s[0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        """From when it was to be sent to its last token."""
        return self.token_times_s[-1] - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1); None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        took_s = self.token_times_s[-1] - self.token_times_s[0]
        return took_s / (self.completion_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """The gaps between one event that carried tokens and the next."""
        return [after - before for before, after in pairwise(self.token_times_s)]
