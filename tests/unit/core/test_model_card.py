"""A model's card is read as it was written, and a folder without one is a clear error."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.model_card import ModelCard


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    return ModelCard(
        folder=str(tmp_path),
        source="weights.gguf",
        name="m",
        revision="abc",
        architecture="llama",
        vocab_size=10,
        context_window=20,
        eos_token_ids=(1, 2),
        bos_token="<s>",
        eos_token="</s>",
    )


def test_a_card_is_read_as_it_was_written(card: ModelCard, tmp_path: Path):
    card.store()
    assert ModelCard.load(tmp_path) == card


def test_a_card_says_where_it_was_found_not_where_it_was_made(card: ModelCard, tmp_path: Path):
    card.store()
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "card.json").rename(moved / "card.json")
    assert ModelCard.load(moved) == replace(card, folder=str(moved))


def test_a_model_without_a_template_says_so(card: ModelCard, tmp_path: Path):
    assert card.chat_template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert card.chat_template == "{{ messages }}"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"eos_token_ids": [1], "colour": 1}'])
def test_a_folder_without_a_readable_card_is_named(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "card.json").write_text(content)
    with pytest.raises(ConfigError, match=f"no readable model card in {tmp_path}"):
        ModelCard.load(tmp_path)
