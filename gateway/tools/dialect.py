"""Which way of writing calls a model was taught, and what belongs to that way."""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import ConfigError
from gateway.tools.dialects import (
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_TAG,
    MISTRAL_ARGS,
    MISTRAL_CALL_ID,
    MISTRAL_OPEN,
    Reader,
    read_hermes,
    read_llama3,
    read_mistral,
)

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way of writing calls.

    `markers` are literals that the tokenizer may hold as control tokens: they are shown to the
    reader although control tokens are no text. `new_id` makes ids as the model's template takes
    them.
    """

    name: str
    reader: Reader
    markers: tuple[str, ...]
    new_id: Callable[[], str]
    # Mistral's later form: a name and its arguments behind each marker, and no list.
    named_calls: bool = False


def choose(setting: str, template: str | None) -> Dialect | None:
    """The dialect that an operator set, or with "auto" the one that the chat template shows.

    None where the template shows none, or with "none". Raises ConfigError for another name.
    """
    source = template or ""
    found = _shown(source) if setting == "auto" else setting
    if found is None or found == "none":
        return None
    if found == "hermes":
        return Dialect(
            name=found,
            reader=read_hermes,
            markers=(HERMES_OPEN, HERMES_CLOSE),
            new_id=_long_id,
        )
    if found == "llama3_json":
        return Dialect(name=found, reader=read_llama3, markers=(LLAMA_TAG,), new_id=_long_id)
    if found == "mistral":
        return Dialect(
            name=found,
            reader=read_mistral,
            markers=(MISTRAL_OPEN, MISTRAL_CALL_ID, MISTRAL_ARGS),
            new_id=_short_id,
            named_calls=MISTRAL_ARGS in source,
        )
    raise ConfigError(f"gateway.tool_parser: there is no {found!r}")


def _shown(source: str) -> str | None:
    if HERMES_OPEN in source:
        return "hermes"
    if MISTRAL_OPEN in source:
        return "mistral"
    if "<|python_tag|>" in source or ('"parameters"' in source and "<|eot_id|>" in source):
        return "llama3_json"
    return None


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Nine letters and digits: Mistral's templates take no other."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
