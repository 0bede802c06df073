"""Log probabilities in OpenAI's two shapes: the chat's, and the older one of completions."""

from collections.abc import Callable, Sequence
from typing import Any

from core.messages import TokenLogprobs
from gateway.choice_text import TextEvent
from gateway.echo import Echo

# A token by itself, as text, and its bytes; a control token has its name and no bytes.
Spell = Callable[[int], tuple[str, bytes | None]]
# What a token that cannot be is told with: JSON has no word for minus infinity.
FLOOR = -9999.0


def chat_logprobs(events: Sequence[TextEvent], spell: Spell) -> dict[str, Any] | None:
    """`{"content": [...]}`, an entry for each token; None where they were not asked for."""
    content = [
        {
            **_chat_token(token_id, each.logprob, spell),
            "top_logprobs": [
                _chat_token(top_id, logprob, spell)
                for top_id, logprob in zip(each.top_token_ids, each.top_logprobs, strict=True)
            ],
        }
        for event in events
        for token_id, each in zip(event.token_ids, event.logprobs, strict=False)
    ]
    return {"content": content, "refusal": None} if content else None


def prompt_logprobs(
    token_ids: Sequence[int], told: Sequence[TokenLogprobs], spell: Spell
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token of a prompt itself and the likeliest, by id; None for the first.

    The likeliest are ranked from 1. What the token's own rank is behind them nobody has counted.
    """
    return [None, *(_ranked(i, each, spell) for i, each in zip(token_ids[1:], told, strict=True))]


def _ranked(token_id: int, each: TokenLogprobs, spell: Spell) -> dict[str, Any]:
    likeliest = zip(each.top_token_ids, each.top_logprobs, strict=True)
    found: dict[str, Any] = {str(token_id): _ranked_token(token_id, each.logprob, None, spell)}
    for rank, (top_id, logprob) in enumerate(likeliest, start=1):
        found[str(top_id)] = _ranked_token(top_id, logprob, rank, spell)
    return found


def _ranked_token(token_id: int, logprob: float, rank: int | None, spell: Spell) -> dict[str, Any]:
    return {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": spell(token_id)[0]}


class LegacyLogprobs:
    """The older shape: four lists of equal length.

    Each entry of `top_logprobs` also has the token itself, which may not be among the likeliest.
    """

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    @property
    def found(self) -> dict[str, list[Any]] | None:
        """What was added; None where that is nothing, since they were not asked for."""
        return self._found if self._found["tokens"] else None

    def add_prompt(self, echo: Echo, logprobs: Sequence[TokenLogprobs]) -> None:
        """The prompt that is repeated: of its first token there is nothing to tell."""
        if echo.token_ids:
            known = (None, *logprobs)
            for token_id, each, offset in zip(echo.token_ids, known, echo.offsets, strict=True):
                self._add(token_id, each, offset)

    def add(self, event: TextEvent, *, behind: int = 0) -> None:
        """An event of an answer that begins after so many characters."""
        if event.logprobs:
            told = zip(event.token_ids, event.logprobs, event.offsets, strict=True)
            for token_id, each, offset in told:
                self._add(token_id, each, behind + offset)

    def _add(self, token_id: int, each: TokenLogprobs | None, offset: int) -> None:
        name = self._name(token_id)
        self._found["tokens"].append(name)
        self._found["text_offset"].append(offset)
        if each is None:
            self._found["token_logprobs"].append(None)
            self._found["top_logprobs"].append(None)
            return
        likeliest = zip(each.top_token_ids, each.top_logprobs, strict=True)
        top = {self._name(i): max(logprob, FLOOR) for i, logprob in likeliest}
        self._found["token_logprobs"].append(max(each.logprob, FLOOR))
        self._found["top_logprobs"].append({name: max(each.logprob, FLOOR)} | top)

    def _name(self, token_id: int) -> str:
        return _legacy_name(token_id, self._spell)


def _chat_token(token_id: int, logprob: float, spell: Spell) -> dict[str, Any]:
    text, raw = spell(token_id)
    told = None if raw is None else list(raw)
    return {"token": text, "logprob": max(logprob, FLOOR), "bytes": told}


def _legacy_name(token_id: int, spell: Spell) -> str:
    """The token's text; where that is no whole text, its bytes: no two tokens share a name."""
    text, raw = spell(token_id)
    if raw is None or text.encode() == raw:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
