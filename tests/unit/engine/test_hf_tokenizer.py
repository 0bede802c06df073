"""Tokenizer files of Qwen2's and Mistral's kind, prepared, encode as transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
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
from transformers import AutoTokenizer

from core.errors import ConfigError
from core.model_card import ModelCard
from engine.prepare import prepare
from gateway.inputs import ChatMessage
from gateway.template import ChatTemplate
from gateway.tokenizer import PromptTokenizer

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 12,
    "vocab_size": 320,
    "max_position_embeddings": 99,
}
MESSAGES = [
    {"role": "system", "content": "be ab"},
    {"role": "user", "content": "abab café 12"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": " ab\nab"},
]
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
INST = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for turn in turns %}"
    "{%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('turns must alternate') }}{%- endif %}"
    "{%- if turn['role'] == 'user' %}"
    "{{- '[INST] ' + (system + '\\n\\n' if system is defined and loop.last else '') }}"
    "{{- turn['content'] + '[/INST]' }}"
    "{%- else %}{{- ' ' + turn['content'] + eos_token }}{%- endif %}{%- endfor %}"
)


def qwen_folder(path: Path, **settings: Any) -> Path:
    """Byte-level BPE that puts nothing before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)} | {"ab": 256, "Ġab": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "ab")]))
    tokenizer.normalizer = normalizers.NFC()
    pattern = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return write_folder(
        path,
        tokenizer,
        control,
        {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 258},
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "bos_token": None,
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "chat_template": CHATML,
        }
        | settings,
    )


def mistral_folder(path: Path, **settings: Any) -> Path:
    """SentencePiece-like BPE with bytes to fall back on; <s> begins a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "e", "1", "2", "ab", "▁ab"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("a", "b"), ("▁", "ab")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return write_folder(
        path,
        tokenizer,
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        {"architectures": ["MistralForCausalLM"], "eos_token_id": 2, "sliding_window": None},
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "__type": "AddedToken"},
            "unk_token": "<unk>",
            "chat_template": INST,
        }
        | settings,
    )


def write_folder(
    path: Path,
    tokenizer: Tokenizer,
    control: list[str],
    config: dict[str, Any],
    settings: dict[str, Any],
) -> Path:
    path.mkdir()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in control])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    settings = {key: value for key, value in settings.items() if value is not ...}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def chat_ids(card: ModelCard, tokenizer: PromptTokenizer) -> list[int]:
    template = ChatTemplate(card, tokenizer.controls, window=99)
    rendered = template.render(tuple(ChatMessage(**message) for message in MESSAGES))
    return list(tokenizer.encode_rendered(rendered))


@pytest.mark.parametrize("make", [qwen_folder, mistral_folder])
@pytest.mark.parametrize("add_bos", [True, False])  # tokenizer.json goes before it
def test_prompts_and_chats_are_encoded_as_transformers_does(
    tmp_path: Path, make: Any, add_bos: Any
) -> None:
    bos = {"bos_token": "<|endoftext|>"} if make is qwen_folder else {}
    folder = make(tmp_path / "m", add_bos_token=add_bos, **bos)
    library = AutoTokenizer.from_pretrained(folder)
    card = prepare(str(folder), tmp_path / "cache")
    tokenizer = PromptTokenizer(card)
    for text in ("ab ab", "café\n\nab 12", " ab", ""):
        ids = library(text)["input_ids"]
        assert list(tokenizer.encode_prompt(text)) == ids, text
        assert tokenizer.decode(ids).strip() == text.strip()
    expected = library.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert chat_ids(card, tokenizer) == expected


def test_the_card_of_a_qwen_folder_names_its_ends(tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [260, 258], "temperature": 0.7})
    )
    card = prepare(str(folder), tmp_path / "cache")
    assert card.architecture == "Qwen2ForCausalLM"
    assert card.eos_token_ids == (258, 260)
    assert (card.bos_token, card.eos_token) == ("", "<|im_end|>")
    assert card.chat_template == CHATML


def test_the_special_tokens_of_an_older_folder_are_found(tmp_path: Path) -> None:
    folder = mistral_folder(tmp_path / "m", bos_token=..., eos_token=...)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    card = prepare(str(folder), tmp_path / "cache")
    assert (card.bos_token, card.eos_token) == ("<s>", "</s>")
    assert card.eos_token_ids == (2,)
    assert chat_ids(card, PromptTokenizer(card))[0] == 1


def test_a_folder_of_vocab_and_merges_is_converted(tmp_path: Path) -> None:
    control = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
    names = {258: "<|endoftext|>", 259: "<|im_start|>", 260: "<|im_end|>"}
    added = {str(each): {"content": name} | control for each, name in names.items()}
    folder = qwen_folder(tmp_path / "m", added_tokens_decoder=added)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads(whole.to_str())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(each) for each in model["merges"]))
    tokenizer = PromptTokenizer(prepare(str(folder), tmp_path / "cache"))
    for text in ("ab ab", "café\n\nab 12"):
        assert list(tokenizer.encode_prompt(text)) == whole.encode(text).ids


def test_of_several_templates_the_default_counts(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": INST}]
    folder = mistral_folder(tmp_path / "m", chat_template=named)
    assert prepare(str(folder), tmp_path / "cache").chat_template == INST


@pytest.mark.parametrize("value", ["2", [2, "x"], True, {"id": 2}])
def test_an_end_that_is_no_token_id_is_named(tmp_path: Path, value: Any) -> None:
    folder = mistral_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id .* no token id"):
        prepare(str(folder), tmp_path / "cache")
