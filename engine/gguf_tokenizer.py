"""A tokenizer.json out of GGUF metadata, without torch.

Byte-level BPE is rebuilt with the `tokenizers` library. A GGUF names its pre-tokenizer by a short
word; the table below says what the words mean. Source: llama.cpp, src/llama-vocab.cpp, and the
tokenizer.json of the models that the words come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from core.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Control tokens that end an answer, whatever the metadata calls them (llama.cpp's list, shortened
# to what Llama-family vocabularies hold).
_END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "</s>",
        "<|end|>",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Which tokens end an answer, and the texts that a chat template may print."""

    eos_token_ids: tuple[int, ...]
    bos_token: str
    eos_token: str


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is cut before BPE. `pattern` None: GPT-2's own, which ByteLevel has built in."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    # A word that is a token is taken whole, without regard to the merges.
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS: dict[str, _Pre] = {
    "default": _Pre(),
    "gpt-2": _Pre(),
    "smollm": _Pre(single_digits=True),
    "llama-bpe": _Pre(_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": _Pre(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Pre(_QWEN2, nfc=True),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),  # Mistral Nemo
}


def is_byte_level_bpe(metadata: Mapping[str, Any], source: str) -> bool:
    """Whether `bpe_tokenizer` rebuilds the file's tokenizer; else it is a SentencePiece one.

    Raises ConfigError where it is neither.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"{source}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    return bool(kind == "gpt2")


def bpe_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer of a GGUF whose `tokenizer.ggml.model` is gpt2. Raises ConfigError."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(str(name))
    if pre is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"{source}: pre-tokenizer {name!r} is not supported; supported: {known}")
    tokens = _tokens(metadata, source)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(metadata, set(tokens), source),
            ignore_merges=pre.ignore_merges,
        )
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cutter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _mark_added(tokenizer, tokens, metadata)
    _add_bos(tokenizer, tokens, metadata, pre)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any], source: str) -> SpecialTokens:
    """The ends of an answer: what the metadata names, and the well-known control tokens."""
    tokens = _tokens(metadata, source)
    types = metadata.get("tokenizer.ggml.token_type", ())
    ends = {
        _token_id(metadata, f"tokenizer.ggml.{key}_token_id", tokens)
        for key in ("eos", "eot", "eom")
    } - {None}
    ends |= {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    }
    if not ends:
        raise ConfigError(f"{source}: no token is known to end an answer")
    bos = _token_id(metadata, "tokenizer.ggml.bos_token_id", tokens)
    eos = _token_id(metadata, "tokenizer.ggml.eos_token_id", tokens)
    return SpecialTokens(
        eos_token_ids=tuple(sorted(each for each in ends if each is not None)),
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
    )


def _tokens(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
        raise ConfigError(f"{source}: the metadata has no tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{source}: a token stands twice in the vocabulary")
    return tokens


def _merges(metadata: Mapping[str, Any], vocab: set[str], source: str) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        left, _, right = str(merge).partition(" ")
        if not {left, right, left + right} <= vocab:
            raise ConfigError(f"{source}: merge {merge!r} is not of the vocabulary")
        merges.append((left, right))
    return merges


def _token_id(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _cutter(pre: _Pre) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    if pre.pattern is not None:
        split = pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    if pre.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    return byte_level


def _mark_added(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    types = metadata.get("tokenizer.ggml.token_type", ())
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    special = [token for token in added if token.special]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_bos(
    tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any], pre: _Pre
) -> None:
    bos = _token_id(metadata, "tokenizer.ggml.bos_token_id", tokens)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos):
        tokenizer.post_processor = byte_level
        return
    template = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A",
        pair=f"{tokens[bos]} $A {tokens[bos]} $B:1",
        special_tokens=[(tokens[bos], bos)],
    )
    tokenizer.post_processor = processors.Sequence([byte_level, template])
