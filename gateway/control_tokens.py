"""The tokens that only a template, never a client, may put into a prompt.

A control token is any token that the tokenizer matches as a literal: `<|im_start|>`, `</think>`,
`[INST]`. Runs of blanks that some tokenizers add as literals are ordinary text and stay so.

A client's text is kept from them twice. `mask` takes the literals apart while a template is
rendered, by writing a lone surrogate for every character that starts one; no client text holds a
lone surrogate, since the gateway refuses them. And `without_controls` makes a tokenizer that knows
no literal and can reach no control id from text, for everything that is not a literal of the
template's own.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_FIRST_SURROGATE = 0xD800


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """One literal and how the tokenizer's definition says it is matched."""

    token_id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool

    @property
    def pattern(self) -> str:
        literal = re.escape(self.content)
        return rf"(?<!\w){literal}(?!\w)" if self.single_word else literal


def is_blank(content: str) -> bool:
    """Whether an added token is a run of blanks, which is text like any other."""
    return content.strip() == ""


class ControlTokens:
    """Every control token of one tokenizer."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        # Longest first, so that one literal that begins another does not win.
        ordered = sorted(tokens, key=lambda token: -len(token.content))
        self.ids = frozenset(token.token_id for token in ordered)
        self.special_ids = frozenset(token.token_id for token in ordered if token.special)
        self.literals = tuple(token.content for token in ordered)
        self._by_literal = {token.content: token for token in ordered}
        # `(?!)` matches nothing, for a tokenizer without control tokens.
        self._pattern = re.compile("|".join(token.pattern for token in ordered) or "(?!)")
        starts = sorted({content[0] for content in self.literals})
        self._mask = {ord(start): _FIRST_SURROGATE + i for i, start in enumerate(starts)}
        self._unmask = {stand_in: start for start, stand_in in self._mask.items()}

    @classmethod
    def of(cls, definition: dict[str, Any]) -> "ControlTokens":
        """Reads the added tokens of a tokenizer.json."""
        return cls(
            ControlToken(
                token_id=added["id"],
                content=added["content"],
                special=added.get("special", False),
                lstrip=added.get("lstrip", False),
                rstrip=added.get("rstrip", False),
                single_word=added.get("single_word", False),
            )
            for added in definition.get("added_tokens", ())
            if not is_blank(added["content"])
        )

    def id_of(self, literal: str) -> int | None:
        """The id of a special token's literal; None where the literal is text to a reader."""
        token = self._by_literal.get(literal)
        return token.token_id if token is not None and token.special else None

    def mask(self, text: str) -> str:
        """A client's text in which no literal occurs, and with which none can be completed."""
        return text.translate(self._mask)

    def unmask(self, text: str) -> str:
        """Undoes `mask`, in whatever a template made of the text."""
        return text.translate(self._unmask)

    def split(self, rendered: str) -> Iterator[str | int]:
        """The template's own control tokens as ids, and the unmasked text between them."""
        start, eats_blanks = 0, False
        for match in self._pattern.finditer(rendered):
            token = self._by_literal[match[0]]
            yield from self._text(rendered[start : match.start()], eats_blanks, token.lstrip)
            yield token.token_id
            start, eats_blanks = match.end(), token.rstrip
        yield from self._text(rendered[start:], eats_blanks, False)

    def _text(self, between: str, left: bool, right: bool) -> Iterator[str]:
        """Some control tokens swallow the blanks beside them."""
        between = between.lstrip() if left else between
        between = between.rstrip() if right else between
        if between:
            yield self.unmask(between)


def without_controls(definition: dict[str, Any], controls: ControlTokens) -> dict[str, Any]:
    """A tokenizer.json that turns no text into a control token.

    The literals go, the vocabulary's entries of that name become names that no pre-tokenised text
    has (a blank is always written otherwise there), and so do the merges that lead to them. The
    unknown token keeps its name: it stands for what the vocabulary lacks.
    """
    model = definition["model"]
    hidden = set(controls.literals) - {model.get("unk_token")}
    vocab = {
        f" {name}" if name in hidden else name: token_id
        for name, token_id in model["vocab"].items()
    }
    merges = [merge for merge in model["merges"] if not _leads_to(merge, hidden)]
    blanks = [each for each in definition.get("added_tokens", ()) if is_blank(each["content"])]
    return {
        **definition,
        "added_tokens": blanks,
        "post_processor": None,
        "model": {**model, "vocab": vocab, "merges": merges},
    }


def _leads_to(merge: str | list[str], hidden: set[str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right in hidden or left in hidden or right in hidden
