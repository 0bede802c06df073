"""Budgets and floors: the page has the module's numbers, and the module the engine's."""

from pathlib import Path

import pytest
from pytest import approx

from bench.floors import H100, LLAMA_8B, LLAMA_70B, QWEN3_32B, SERVED, Served, Shape, renewed
from core.config import ClusterConfig
from engine.model_config import ModelConfig
from engine.preflight import weight_bytes

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "deploy" / "recipes").glob("*.toml"))
GIVEN = {LLAMA_8B: 8.03e9, LLAMA_70B: 70.55e9, QWEN3_32B: 32.76e9}


def config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        vocab_size=shape.vocab_size,
        tie_embeddings=False,
        context_window=131_072,
        qk_norm=shape.qk_norm,
    )


def test_the_page_has_the_modules_table() -> None:
    page = (ROOT / "docs" / "roofline.md").read_text()
    assert renewed(page) == page
    assert "| Llama-3.1-8B |" in page


@pytest.mark.parametrize("shape", GIVEN, ids=lambda shape: shape.name)
def test_the_shapes_are_the_models(shape: Shape) -> None:
    parameters = shape.body_parameters + 2 * shape.head_parameters + shape.norm_parameters
    assert parameters == approx(GIVEN[shape], rel=2e-3)


@pytest.mark.parametrize("shape", GIVEN, ids=lambda shape: shape.name)
def test_the_engine_counts_the_same_weights(shape: Shape) -> None:
    plain, fp8 = Served(shape=shape, gpu=H100), Served(shape=shape, gpu=H100, fp8=True)
    assert plain.weight_bytes == weight_bytes(config(shape), 2)
    assert fp8.weight_bytes == weight_bytes(config(shape), 2, 1)


def test_floors_are_what_the_data_sheet_leaves() -> None:
    served = SERVED["Llama-3.1-8B"]
    assert served.kv_token_bytes == 2 * 32 * 8 * 128 * 2
    # Weights but the embedding table, and 32 contexts.
    read = 2 * (8.03e9 - 128256 * 4096) + 32 * 1024 * 131072
    assert served.decode_s(32, 1024) == approx(read / 3.35e12, rel=1e-3)
    assert served.handoff_s(1024) == approx(1024 * 131072 / 450e9)
    # So many sequences that the products take longer than the weights.
    assert served.decode_s(100_000, 0) == approx(2e5 * 7.5e9 / 989e12, rel=2e-2)
    # So short a prompt that reading the weights takes longer than its products.
    assert served.prefill_s(1) == approx(served.decode_s(1, 0))


def test_two_gpus_take_half_of_everything() -> None:
    one = Served(shape=LLAMA_70B, gpu=H100, fp8=True)
    two = SERVED["Llama-3.1-70B, FP8, TP2"]
    assert one.kv_tokens() == 0
    assert two.kv_tokens() > 0
    for floor in (
        lambda s: s.prefill_s(8192),
        lambda s: s.decode_s(8, 512),
        lambda s: s.handoff_s(9),
    ):
        assert floor(two) == approx(floor(one) / 2)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_takes_four_gpus_and_holds_a_window(path: Path) -> None:
    recipe = ClusterConfig.from_toml(path)
    assert recipe.prefill_workers + recipe.decode_workers == 4
    shape = {"meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B, "Qwen/Qwen3-32B": QWEN3_32B}
    fp8 = recipe.engine.quantisation == "fp8"
    served = Served(shape=shape[recipe.model], gpu=H100, fp8=fp8)
    assert recipe.engine.max_model_len is not None
    assert served.kv_tokens() > recipe.engine.max_model_len
    assert f"`{path.name}`" in (ROOT / "deploy" / "recipes" / "README.md").read_text()
