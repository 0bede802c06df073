"""The bytes that each token stands for: what makes incremental decoding exact.

Two decoders cover the served families. `ByteLevel` writes each byte as a printable character (Llama
3, Qwen, SmolLM). The SentencePiece kind writes a blank as U+2581 and bytes outside its vocabulary
as `<0x0A>` (Llama 2, Mistral).
"""

import re
from collections.abc import Callable
from typing import Any

from core.errors import ConfigError

_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_reader(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """The function from a vocabulary entry to bytes, for a tokenizer.json's decoder.

    The decoder's `Strip` has no part here: it takes the blank off the start of a text, and what a
    model generates is the continuation of one. Raises ConfigError for a decoder not known here.
    """
    parts = (decoder or {}).get("decoders", [decoder or {"type": "none"}])
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece
    raise ConfigError(f"the tokenizer's decoder ({', '.join(sorted(kinds))}) is not supported")


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _alphabet()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in name])
    except KeyError:  # an added token with characters outside the alphabet is written as it is
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    if match := _HEX_BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    return name.replace(_BLANK, " ").encode()
