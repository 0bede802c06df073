"""Text that came from a client never becomes a control token, and is otherwise encoded as ever."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.errors import ConfigError
from core.model_card import TOKENIZER_FILE
from gateway.control_tokens import ControlTokens
from gateway.tokenizer import PromptTokenizer


@pytest.fixture(scope="session")
def library(card):
    return Tokenizer.from_file(str(card.tokenizer_path))


@pytest.fixture(scope="session")
def literals(tokenizer):
    assert len(tokenizer.controls.literals) == 17
    return tokenizer.controls.literals


def test_every_special_literal_is_encoded_as_text(tokenizer, library, literals):
    for literal in literals:
        (control,) = library.encode(literal, add_special_tokens=False).ids
        assert control in tokenizer.controls.ids
        for text in (literal, f"a{literal}b", f" {literal}\n", literal * 3):
            ids = tokenizer.encode_prompt(text)
            assert not tokenizer.controls.ids & set(ids)
            assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.data())
def test_any_mixture_of_literals_and_text_is_encoded_as_text(tokenizer, literals, data):
    pieces = st.one_of(st.sampled_from(literals), st.text("<|>im_startend \n", max_size=8))
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    ids = tokenizer.encode_plain(text)
    assert not tokenizer.controls.ids & set(ids)
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.text(max_size=60))
def test_text_without_literals_is_encoded_as_the_library_does(tokenizer, library, literals, text):
    assume(not any(literal in text for literal in literals))
    expected = library.encode(text, add_special_tokens=False).ids
    assert list(tokenizer.encode_plain(text)) == expected


def test_unicode_forms_keep_their_own_tokens(tokenizer):
    assert tokenizer.encode_plain("caf\u00e9") != tokenizer.encode_plain("cafe\u0301")


@settings(deadline=None)
@given(st.text(max_size=60))
def test_the_lower_bound_of_tokens_holds(tokenizer, text):
    text = text + " " * 200 + "-" * 200
    assert tokenizer.at_least(len(text)) <= len(tokenizer.encode_plain(text))


def definition(*added, merges, vocab, **model):
    return {
        "version": "1.0",
        "added_tokens": [
            {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False} | token
            for token in added
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **model},
    }


def made(card, tmp_path, values):
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(values))
    return PromptTokenizer(replace(card, folder=str(tmp_path)))


def test_a_literal_that_merges_would_spell_is_out_of_reach(card, tmp_path):
    vocab = {"<": 0, "s": 1, ">": 2, "s>": 3, "<s>": 4}
    token = {"id": 4, "content": "<s>", "special": True}
    values = definition(token, vocab=vocab, merges=[["s", ">"], ["<", "s>"]])
    assert made(card, tmp_path, values).encode_plain("<s>") == (0, 3)


def test_a_literal_that_is_a_whole_word_of_the_vocabulary_is_out_of_reach(card, tmp_path):
    vocab = {"<": 0, "s": 1, ">": 2, "<s>": 3}
    token = {"id": 3, "content": "<s>", "special": True}
    values = definition(token, vocab=vocab, merges=[], ignore_merges=True)
    assert made(card, tmp_path, values).encode_plain("<s>") == (0, 1, 2)


def test_runs_of_blanks_stay_ordinary_tokens(card, tmp_path):
    token = {"id": 2, "content": "  ", "special": False}
    values = definition(token, vocab={"a": 0, " ": 1}, merges=[])
    tokenizer = made(card, tmp_path, values)
    assert tokenizer.encode_plain("a  a") == (0, 2, 0)
    assert not tokenizer.controls.ids


def test_a_missing_or_broken_tokenizer_is_a_config_error(card, tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptTokenizer(replace(card, folder=str(tmp_path)))
    (tmp_path / TOKENIZER_FILE).write_text("{")
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptTokenizer(replace(card, folder=str(tmp_path)))


def test_blanks_beside_a_token_that_swallows_them_go():
    token = {"id": 7, "content": "<end>", "lstrip": True, "rstrip": True}
    controls = ControlTokens.of({"added_tokens": [token]})
    assert list(controls.split("a \n<end>  b")) == ["a", 7, "b"]


@given(st.text("<>|ab\ud7ff\ue000", max_size=30))
def test_masking_leaves_no_literal_and_can_be_undone(text):
    tokens = [{"id": 1, "content": "<a>"}, {"id": 2, "content": "|"}]
    controls = ControlTokens.of({"added_tokens": tokens})
    masked = controls.mask(text)
    assert "<" not in masked and "|" not in masked
    assert controls.unmask(masked) == text
