"""One choice of a request as text: tokens in, text that is certain out."""

from dataclasses import dataclass, field

from core.messages import StopReason, TokenLogprobs
from gateway.backend import TokenBatch
from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopStrings

# Their last token is no text.
_SILENT = frozenset({StopReason.EOS, StopReason.STOP_SEQUENCE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """Why a choice is over. With STOP_SEQUENCE, one of `stop` and `stop_token_id` says by what."""

    stop_reason: StopReason
    stop: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True, kw_only=True)
class TextEvent:
    """Text that became certain, and the tokens that arrived with it. Either may be empty.

    Nobody changes one. It is not frozen, since a frozen one takes three times as long to make, and
    one is made for each token.
    """

    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    choice: int = 0
    # Where they were asked for, one for each token; `offsets` are the characters before it.
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    offsets: tuple[int, ...] = field(default=(), repr=False)
    # With a request's first event, where they were asked for: of each prompt token but the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    # Set with the last event of the choice.
    end: ChoiceEnd | None = None


class ChoiceText:
    """Takes batches of one choice. Neither text nor count depends on how tokens were batched.

    Stop strings are looked for behind the first `min_tokens` tokens; after a match nothing more
    comes out, and what arrived behind the token that completed it counts for nothing.
    """

    def __init__(
        self, choice: int, detokenizer: Detokenizer, stops: StopStrings, *, min_tokens: int = 0
    ) -> None:
        self._choice = choice
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_chars = 0
        self.num_tokens = 0
        self.end: ChoiceEnd | None = None

    def take(self, batch: TokenBatch) -> TextEvent:
        """The batch's text; with its last one, the choice's end."""
        reason = batch.stop_reason
        silent = reason is not None and reason in _SILENT
        count = len(batch.token_ids)
        parts: list[str] = []
        offsets: list[int] = []
        for i, token_id in enumerate(batch.token_ids, start=1):
            self.num_tokens += 1
            if batch.logprobs:
                offsets.append(self._num_chars)
            if silent and i == count:
                break  # the token that ended the answer is not part of its text
            text = self._detokenizer.feed(token_id)
            self._num_chars += len(text)
            parts.append(self._stops.feed(text) if self.num_tokens > self._min_tokens else text)
            if self._stops.matched:
                count = i
                break
        if self._stops.matched or reason is not None:
            parts += self._finish(batch)
        return TextEvent(
            choice=self._choice,
            text="".join(parts),
            token_ids=batch.token_ids[:count],
            logprobs=batch.logprobs[:count],
            offsets=tuple(offsets),
            prompt_logprobs=batch.prompt_logprobs,
            end=self.end,
        )

    def _finish(self, batch: TokenBatch) -> list[str]:
        """Notes the end, and gives what was still held back."""
        held: list[str] = []
        if not self._stops.matched:
            held.append(self._stops.feed(self._detokenizer.finish()))
            held.append(self._stops.finish())
        reason, token_id = batch.stop_reason, None
        if self._stops.matched:
            reason = StopReason.STOP_SEQUENCE
        elif reason is StopReason.STOP_SEQUENCE and batch.token_ids:
            token_id = batch.token_ids[-1]
        assert reason is not None
        self.end = ChoiceEnd(stop_reason=reason, stop=self._stops.matched, stop_token_id=token_id)
        return held
