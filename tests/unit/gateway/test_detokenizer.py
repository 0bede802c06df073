"""Incremental decoding is exact: the deltas are the text, to the byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.errors import ConfigError
from gateway.detokenizer import Detokenizer
from gateway.token_bytes import byte_reader

TEXTS = [
    "🚀",
    "삼겹살",
    "e\u0301",
    "👨‍👩‍👧‍👦",
    "naïve café “ok”\x00",
    "Ω≈ç√∫µ≤",
    "\ufeffx\r\n\t",
]


def deltas(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@pytest.fixture(scope="session")
def library(card):
    return Tokenizer.from_file(str(card.tokenizer_path))


@pytest.mark.parametrize("text", TEXTS)
def test_characters_that_span_tokens_come_whole(tokenizer, text):
    ids = tokenizer.encode_plain(text)
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 49_151), max_size=60))
def test_random_tokens_decode_as_the_library_decodes_them_at_once(tokenizer, library, ids):
    whole = library.decode(ids, skip_special_tokens=True)
    assert "".join(deltas(tokenizer, ids)) == whole
    assert tokenizer.decode(ids) == whole


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc"), max_codepoint=0x3FFFF), max_size=40))
def test_encoding_and_decoding_keep_every_text(tokenizer, text):
    # The model has no token for some control characters and for the planes that are not assigned.
    assert "".join(deltas(tokenizer, tokenizer.encode_plain(text))) == text


def test_an_end_inside_a_character_is_one_replacement_character(tokenizer):
    ids = tokenizer.encode_plain("🚀")
    assert len(ids) > 2
    parts = deltas(tokenizer, ids[:-1])
    assert parts == [""] * (len(ids) - 1) + ["\ufffd"]


def test_special_tokens_are_no_text(tokenizer):
    ids = [*sorted(tokenizer.controls.special_ids), *tokenizer.encode_plain("hi")]
    assert "".join(deltas(tokenizer, ids)) == "hi"


def test_ids_beyond_the_vocabulary_are_no_text(tokenizer):
    assert deltas(tokenizer, [10**9]) == ["", ""]


def test_sentencepiece_entries_are_blanks_and_bytes():
    parts = ["Replace", "ByteFallback", "Fuse", "Strip"]
    read = byte_reader({"type": "Sequence", "decoders": [{"type": kind} for kind in parts]})
    assert read("\u2581Hello") == b" Hello"
    assert b"".join(map(read, ["<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"])).decode() == "🚀"


def test_a_decoder_that_is_not_known_is_a_config_error():
    with pytest.raises(ConfigError, match="WordPiece"):
        byte_reader({"type": "WordPiece"})
