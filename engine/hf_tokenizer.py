"""Tokenizer files of Hugging Face folders, and conversion where there is no tokenizer.json."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from core.errors import ConfigError
from core.model_card import TEMPLATE_FILE, TOKENIZER_FILE
from engine.gguf_tokenizer import SpecialTokens


def copy_tokenizer(source: Path, target: Path) -> SpecialTokens:
    """Brings a Hugging Face folder's tokenizer and template to `target`. Raises ConfigError."""
    # Older folders name the special tokens in a file of their own.
    settings = _read_json(source / "special_tokens_map.json")
    settings |= _read_json(source / "tokenizer_config.json")
    if (source / TOKENIZER_FILE).is_file():
        shutil.copyfile(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
    else:
        convert_tokenizer(source, target)
    template = _template(source, settings)
    if template is not None:
        (target / TEMPLATE_FILE).write_text(template)
    try:
        tokenizer = Tokenizer.from_file(str(target / TOKENIZER_FILE))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{source / TOKENIZER_FILE} is unreadable: {error}") from error
    return _special_tokens(source, settings, tokenizer)


def convert_tokenizer(source: Path, target: Path, gguf_file: str | None = None) -> None:
    """Makes tokenizer.json through transformers: slow, and loads torch, but knows every kind."""
    try:
        from transformers import AutoTokenizer

        options = {} if gguf_file is None else {"gguf_file": gguf_file}
        AutoTokenizer.from_pretrained(source, **options).backend_tokenizer.save(
            str(target / TOKENIZER_FILE)
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        path = source if gguf_file is None else source / gguf_file
        raise ConfigError(f"{path}: the tokenizer cannot be converted: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return values


def _template(source: Path, settings: dict[str, Any]) -> str | None:
    if (source / TEMPLATE_FILE).is_file():
        return (source / TEMPLATE_FILE).read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(source: Path, settings: dict[str, Any], tokenizer: Tokenizer) -> SpecialTokens:
    bos, eos = _text(settings.get("bos_token")), _text(settings.get("eos_token"))
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(source / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in ids):
            raise ConfigError(f"{source / name}: eos_token_id {value!r} is no token id")
        ends.update(ids)
    named = tokenizer.token_to_id(eos) if eos else None
    if named is not None:
        ends.add(named)
    if not ends:
        raise ConfigError(f"{source}: no token is known to end an answer")
    return SpecialTokens(eos_token_ids=tuple(sorted(ends)), bos_token=bos, eos_token=eos)


def _text(token: Any) -> str:
    """A token's text: written as a string, or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
