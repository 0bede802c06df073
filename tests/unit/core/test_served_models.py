"""Every process of a cluster knows its models by the same names."""

from pathlib import Path

import pytest

from core.config import ClusterConfig
from core.errors import ConfigError
from core.model_card import ModelCard
from core.model_settings import ModelSettings
from core.served_models import card_link, load_served, model_named, served_models


def _card(folder: Path, name: str) -> ModelCard:
    folder.mkdir()
    card = ModelCard(
        folder=str(folder),
        source="",
        name=name,
        revision="1",
        architecture="llama",
        vocab_size=1,
        context_window=1,
        eos_token_ids=(),
        bos_token="",
        eos_token="",
    )
    card.store()
    return card


@pytest.fixture
def cards(tmp_path: Path) -> list[ModelCard]:
    return [_card(tmp_path / name, name) for name in ("first", "second")]


def _config(*models: ModelSettings) -> ClusterConfig:
    return ClusterConfig(models=models)


def test_a_model_without_a_name_has_its_cards(cards: list[ModelCard], tmp_path: Path):
    config = _config(ModelSettings(model="x"), ModelSettings(model="y", served_name="mine"))
    config.store(tmp_path)
    for number, card in enumerate(cards):
        (tmp_path / card_link(number)).symlink_to(card.folder)
    models = load_served(config, tmp_path)
    assert [(model.name, model.card.name) for model in models] == [
        ("first", "first"),
        ("mine", "second"),
    ]
    assert [model.config.model for model in models] == ["x", "y"]


def test_two_cards_of_one_name_are_refused(cards: list[ModelCard]):
    config = _config(ModelSettings(model="x"), ModelSettings(model="y"))
    with pytest.raises(ConfigError, match="two names or aliases are 'first'"):
        served_models(config, [cards[0], cards[0]])


def test_an_alias_that_is_anothers_name_is_refused(cards: list[ModelCard]):
    config = _config(ModelSettings(model="x"), ModelSettings(model="y", aliases=("first",)))
    with pytest.raises(ConfigError, match="two names or aliases are 'first'"):
        served_models(config, cards)


def test_a_worker_is_told_which_model_it_serves(cards: list[ModelCard]):
    one = served_models(ClusterConfig(), cards[:1])
    assert model_named(one, None).name == "first"
    two = served_models(_config(ModelSettings(model="x"), ModelSettings(model="y")), cards)
    assert model_named(two, "second").name == "second"
    with pytest.raises(ConfigError, match="--model third is not served here: one of first, second"):
        model_named(two, "third")
    with pytest.raises(ConfigError, match="--model is needed: one of first, second"):
        model_named(two, None)
