"""The models of a cluster with their names, as every process of it knows them.

A model without a name of the operator's has its card's, so that names are known once the cards are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import ClusterConfig
from core.errors import ConfigError
from core.model_card import ModelCard
from core.model_settings import twice


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model. `config` is what a cluster of it alone would be told."""

    name: str
    aliases: tuple[str, ...] = ()
    card: ModelCard
    config: ClusterConfig


def card_link(number: int) -> str:
    """The name in the run directory of a link to the card folder of the model of this number."""
    return f"card-{number}" if number else "card"


def served_models(config: ClusterConfig, cards: Sequence[ModelCard]) -> tuple[ServedModel, ...]:
    """The models with their cards, in the order of the settings.

    Raises ConfigError where two have one name.
    """
    models = tuple(
        ServedModel(
            name=settings.served_name or card.name,
            aliases=settings.aliases,
            card=card,
            config=config.of_model(settings),
        )
        for settings, card in zip(config.each_model, cards, strict=True)
    )
    names = [name for model in models for name in (model.name, *model.aliases)]
    if (name := twice(names)) is not None:
        raise ConfigError(f"models: two names or aliases are {name!r}; served_name sets another")
    return models


def load_served(config: ClusterConfig, run_dir: Path) -> tuple[ServedModel, ...]:
    """The models of the cluster that meets in this directory."""
    count = len(config.each_model)
    return served_models(
        config, [ModelCard.load((run_dir / card_link(i)).resolve()) for i in range(count)]
    )


def model_named(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model that a worker was told to serve; None: the only one.

    Raises ConfigError where there is none of that name, or it takes one to choose.
    """
    if name is None and len(models) == 1:
        return models[0]
    for model in models:
        if model.name == name:
            return model
    why = "is needed" if name is None else f"{name} is not served here"
    raise ConfigError(f"--model {why}: one of {', '.join(each.name for each in models)}")
