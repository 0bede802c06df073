"""How many ranks a worker has: per pool, per model, and where the two must agree."""

import pytest

from core.config import ClusterConfig
from core.errors import ConfigError


def test_pools_and_models_have_ranks_of_their_own() -> None:
    config = ClusterConfig.validated(
        {
            "models": [
                {"model": "a", "served_name": "a", "decode_tensor_parallel": 4},
                {"model": "b", "served_name": "b"},
            ],
            "engine": {"prefill_tensor_parallel": 2},
        },
        source="t",
    )
    engines = [config.of_model(model).engine for model in config.each_model]
    ranks = [(each.prefill_tensor_parallel, each.decode_tensor_parallel) for each in engines]
    assert ranks == [(2, 4), (2, 1)]


@pytest.mark.parametrize("ranks", [0, 17, 2.0, True])
def test_a_number_that_is_none_is_refused_by_name(ranks: object) -> None:
    with pytest.raises(ConfigError, match=r"engine\.decode_tensor_parallel"):
        ClusterConfig.validated({"engine": {"decode_tensor_parallel": ranks}}, source="t")


def test_workers_that_turn_have_one_number_of_ranks() -> None:
    settings = {"prefill_tensor_parallel": 2, "decode_tensor_parallel": 1}
    with pytest.raises(ConfigError, match=r"prefill_tensor_parallel, 2, and .* 1, to be the same"):
        ClusterConfig.validated({"engine": settings, "scheduler": {"elastic": "auto"}}, source="t")
    alike = settings | {"decode_tensor_parallel": 2}
    ClusterConfig.validated({"engine": alike, "scheduler": {"elastic": "auto"}}, source="t")
