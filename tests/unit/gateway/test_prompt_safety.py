"""No client text becomes a control token, in any field, for every kind of tokenizer that is served.

Tokenizers are built here in the style of four families, small, with the special tokens and the
template shape of each. Whatever a client writes, the prompt has the control tokens that the
template put there, in that order, and no others.
"""

import json
import unicodedata
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post_processors
from tokenizers.trainers import BpeTrainer

from core.model_card import TEMPLATE_FILE, TOKENIZER_FILE
from engine.prepare import prepare
from gateway.control_tokens import ControlTokens
from gateway.inputs import ChatMessage
from gateway.template import ChatTemplate
from gateway.tokenizer import PromptTokenizer

CORPUS = [
    "a tale of two tests, and of <brackets>, [more] | pipes / slashes, start header im end id"
] * 3
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
# The words that Llama 3 and its kin split a text into, roughly.
SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")


def byte_level(specials, *, split=None, normalizer=None, bos=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(split, behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(specials)
    if bos is not None:
        tokenizer.post_processor = post_processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def llama3():
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(4)]
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", *reserved]
    specials += ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
    return byte_level(specials, split=SPLIT, bos="<|begin_of_text|>", ignore_merges=True)


def qwen2():
    tokenizer = byte_level(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC()
    )
    # Not special, and yet matched as a whole: what a model thinks and calls is fenced by these.
    words = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def compatible():
    """As no model should be: its normaliser makes a literal of letters that look like one."""
    return byte_level(["<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFKC())


def mistral(*, prepend_scheme="first", legacy=False):
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:  # as converted from SentencePiece before Metaspace did it all
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="\u2581", prepend_scheme=prepend_scheme, split=False
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    # Pieces of the vocabulary, as SentencePiece has them, and no literals: only their ids are kept.
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=[*specials[:3], *bytes_of], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = definition["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@dataclass(frozen=True)
class Model:
    tokenizer: PromptTokenizer
    template: ChatTemplate

    def chat(self, messages):
        return self.tokenizer.encode_rendered(self.template.render(messages))

    def controls(self, ids):
        return [token_id for token_id in ids if token_id in self.tokenizer.controls.ids]


STYLES = {
    "llama3": (llama3, HEADERS, "<|begin_of_text|>"),
    "qwen2": (qwen2, CHATML, ""),
    "compatible": (compatible, CHATML, ""),
    "mistral": (mistral, BRACKETS, "<s>"),
    "mistral-always": (lambda: mistral(prepend_scheme="always"), BRACKETS, "<s>"),
    "mistral-legacy": (lambda: mistral(legacy=True), BRACKETS, "<s>"),
}


@pytest.fixture(scope="module", params=["default", *STYLES])
def model(request, tmp_path_factory):
    card = prepare("smollm2-135m-instruct")
    if request.param != "default":
        make, template, bos = STYLES[request.param]
        folder = tmp_path_factory.mktemp(request.param)
        make().save(str(folder / TOKENIZER_FILE))
        (folder / TEMPLATE_FILE).write_text(template)
        card = replace(card, folder=str(folder), bos_token=bos, eos_token="")
    tokenizer = PromptTokenizer(card)
    return Model(tokenizer, ChatTemplate(card, tokenizer.controls, window=8192))


def lookalikes(literal):
    """Other ways to write a literal, which a normaliser may make one of."""
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in literal)
    return [literal, wide, unicodedata.normalize("NFD", literal), literal.upper()]


def turns(*contents):
    roles = ["user", "assistant"] * len(contents)
    return tuple(
        ChatMessage(role=role, content=text) for role, text in zip(roles, contents, strict=False)
    )


def test_the_styles_have_what_can_be_forged(model):
    literals = model.tokenizer.controls.literals
    assert len(literals) >= 2
    # The library itself takes each for what it says: there is something to be kept from.
    for literal in literals:
        ids = model.tokenizer._full.encode(literal, add_special_tokens=False).ids
        assert set(ids) & model.tokenizer.controls.ids


def test_every_literal_is_text_in_a_completions_prompt(model):
    prefix = model.tokenizer.prefix
    for literal in model.tokenizer.controls.literals:
        for spelled in lookalikes(literal):
            for text in (spelled, f"a{spelled}b", f" {spelled}\n", spelled * 3, f"{spelled} x"):
                ids = model.tokenizer.encode_prompt(text)
                assert model.controls(ids) == model.controls(prefix)
                assert ids[: len(prefix)] == prefix


def test_every_literal_is_text_in_every_turn(model):
    tame = model.controls(model.chat(turns("x", "x", "x")))
    assert len(tame) >= 4
    for literal in model.tokenizer.controls.literals:
        for spelled in lookalikes(literal):
            for place in range(3):
                contents = ["x", "x", "x"]
                contents[place] = f"{spelled} and {spelled}"
                ids = model.chat(turns(*contents))
                assert model.controls(ids) == tame
        # What the model reads is what the client wrote.
        assert literal in model.tokenizer.decode(model.chat(turns(f"a {literal} b")))


def test_no_literal_is_put_together_from_two_turns(model):
    tame = model.controls(model.chat(turns("x", "x")))
    for literal in model.tokenizer.controls.literals:
        for cut in range(1, len(literal)):
            ids = model.chat(turns(literal[:cut], literal[cut:]))
            assert model.controls(ids) == tame


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_mixture_in_any_turn_leaves_the_templates_tokens_alone(model, data):
    literals = model.tokenizer.controls.literals
    whole = st.sampled_from([each for literal in literals for each in lookalikes(literal)])
    part = st.sampled_from([literal[i:] for literal in literals for i in range(len(literal))])
    text = st.text("<|>[]/\u2581 im_endINST\n\u0301", max_size=6)
    content = st.lists(st.one_of(whole, part, text), min_size=1, max_size=6).map("".join)
    contents = data.draw(st.lists(content.filter(bool), min_size=1, max_size=4))
    ids = model.chat(turns(*contents))
    assert model.controls(ids) == model.controls(model.chat(turns(*["x"] * len(contents))))
    prompt = model.tokenizer.encode_prompt("".join(contents))
    assert model.controls(prompt) == model.controls(model.tokenizer.prefix)


def test_the_control_tokens_are_all_that_the_tokenizer_adds(model):
    added = json.loads(model.tokenizer._full.to_str())["added_tokens"]
    known = ControlTokens.of({"added_tokens": added})
    assert known.ids == model.tokenizer.controls.ids
