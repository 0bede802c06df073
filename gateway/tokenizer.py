"""Prompts to token ids, and token ids to bytes, without torch and without transformers."""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from core.errors import ConfigError
from core.model_card import ModelCard
from gateway.control_tokens import ControlTokens, without_controls
from gateway.token_bytes import byte_reader

# A normaliser may compose characters, three to one at most in the forms of Unicode.
_SHRINK = 4


class PromptTokenizer:
    """The model's tokenizer, with the rule that a client's text never becomes a control token.

    Its methods may be called from any thread. Encoding a megabyte takes about a second, without
    the interpreter's lock, so it belongs in a worker thread. Raises ConfigError where the card's
    tokenizer.json is missing, broken, or of a kind that is not served.
    """

    def __init__(self, card: ModelCard) -> None:
        try:
            source = card.tokenizer_path.read_text()
            definition = json.loads(source)
            self._full = Tokenizer.from_str(source)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ConfigError(f"no readable tokenizer in {card.folder}: {error}") from error
        if not isinstance(self._full.model, BPE):
            raise ConfigError(f"a {type(self._full.model).__name__} tokenizer is not supported")
        self.controls = ControlTokens.of(definition)
        plain = without_controls(definition, self.controls)
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self._continuation = _continuation(plain) or self._plain
        self._bytes_of = byte_reader(definition.get("decoder"))
        self._known: dict[int, bytes] = {}
        names = [*definition["model"]["vocab"], *self.controls.literals]
        self._longest = max(map(len, names)) * (_SHRINK if definition.get("normalizer") else 1)
        # What the tokenizer puts before every text (BOS); often nothing.
        self.prefix = tuple(self._full.encode("").ids)
        self._prove_plain()

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Text as ordinary tokens, whatever literals of control tokens it spells."""
        return self._encode([text], first=True)[0]

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """A prompt to continue: what the tokenizer puts before a text (BOS), then the text."""
        return self.prefix + self.encode_plain(text)

    def encode_rendered(self, rendered: str) -> tuple[int, ...]:
        """A rendered chat, its clients' strings masked: the template's control tokens, and text."""
        parts = list(self.controls.split(rendered))
        texts = [part for part in parts if isinstance(part, str)]
        starts_plain = bool(parts) and isinstance(parts[0], str)
        encoded = iter(self._encode(texts, first=starts_plain))
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(next(encoded))
        return tuple(ids)

    def at_least(self, num_chars: int) -> int:
        """The fewest tokens that text of this many characters can have: a bound without work."""
        return -(-num_chars // self._longest)

    def name(self, token_id: int) -> str:
        """A token as the vocabulary writes it; "" for an id outside of it."""
        return self._full.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing for special tokens and ids outside the table."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read_bytes(token_id)
        return known

    def spelled(self, token_id: int) -> tuple[str, bytes | None]:
        """One token by itself: as text, U+FFFD for what is no UTF-8, and its bytes.

        A control token is told by its name, and has no bytes.
        """
        if token_id in self.controls.special_ids:
            return self.name(token_id), None
        found = self.token_bytes(token_id)
        return found.decode("utf-8", "replace"), found

    def decode(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """The text of all tokens at once: no special ones, U+FFFD for each broken sequence."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def _read_bytes(self, token_id: int) -> bytes:
        name = self._full.id_to_token(token_id)
        if name is None or token_id in self.controls.special_ids:
            return b""
        return self._bytes_of(name)

    def _encode(self, texts: list[str], *, first: bool) -> list[tuple[int, ...]]:
        # encode_batch_fast lets the interpreter's lock go and skips offsets; encode does neither.
        head = texts[:1] if first else []
        encodings = self._plain.encode_batch_fast(head, add_special_tokens=False)
        encodings += self._continuation.encode_batch_fast(
            texts[len(head) :], add_special_tokens=False
        )
        return [tuple(encoding.ids) for encoding in encodings]

    def _prove_plain(self) -> None:
        for literal in self.controls.literals:
            if self.controls.ids.intersection(self.encode_plain(literal)) - {self._unknown_id()}:
                raise ConfigError(f"the tokenizer turns the text {literal!r} into a control token")

    def _unknown_id(self) -> int | None:
        unknown = getattr(self._plain.model, "unk_token", None)
        return self._plain.token_to_id(unknown) if unknown else None


def _continuation(plain: dict[str, Any]) -> Tokenizer | None:
    """For text after a control token, where the tokenizer marks only a text's very first word."""
    changed = json.loads(json.dumps(plain))
    pre = changed.get("pre_tokenizer") or {}
    found = [part for part in (pre, *pre.get("pretokenizers", ())) if _marks_first_word(part)]
    for part in found:
        part["prepend_scheme"] = "never"
    return Tokenizer.from_str(json.dumps(changed)) if found else None


def _marks_first_word(part: dict[str, Any]) -> bool:
    return part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"
