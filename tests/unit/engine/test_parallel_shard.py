"""Which part of a model is whose, and which models ranks cannot share."""

from dataclasses import replace

import pytest

from core.errors import ConfigError
from engine.model_config import ModelConfig
from engine.parallel.shard import WHOLE, Shard, check_ranks

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    vocab_size=128256,
    tie_embeddings=False,
    context_window=8192,
)
SMOLLM2 = replace(LLAMA_8B, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536)


def test_a_lone_rank_has_the_whole_model() -> None:
    assert WHOLE.config(LLAMA_8B) == LLAMA_8B


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_ranks_have_is_the_model_once(ranks: int) -> None:
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    for size in (32, 8, 14336):
        parts = [shard.part_of(size) for shard in shards]
        assert [i for part in parts for i in range(size)[part]] == list(range(size))
    assert all(shard.config(LLAMA_8B).num_heads * ranks == 32 for shard in shards)


def test_more_ranks_than_kv_heads_share_them() -> None:
    heads = [Shard(rank, 8).kv_heads_of(2) for rank in range(8)]
    assert [head.start for head in heads] == [0, 0, 0, 0, 1, 1, 1, 1]
    # A rank's query heads belong to its KV head.
    for rank, head in enumerate(heads):
        queries = range(16)[Shard(rank, 8).part_of(16)]
        assert {query // 8 for query in queries} == {head.start}


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    shards = [Shard(rank, 3) for rank in range(3)]
    assert [range(100)[shard.part_of(100)] for shard in shards] == [
        range(0, 34),
        range(34, 68),
        range(68, 100),
    ]
    assert {shard.config(replace(LLAMA_8B, vocab_size=100)).vocab_size for shard in shards} == {34}


@pytest.mark.parametrize("ranks", [1, 3])
def test_heads_that_divide_are_taken(ranks: int) -> None:
    check_ranks(SMOLLM2, ranks, "engine.tensor_parallel")


@pytest.mark.parametrize(
    ("changes", "ranks", "why"),
    [
        ({}, 2, "2 does not divide the model's 9 attention heads; it can be 1, 3"),
        ({"num_heads": 12}, 4, "4 does not divide the model's 3 KV heads, nor is it a multiple"),
        ({"intermediate_size": 1000}, 3, "3 does not divide the model's intermediate_size of 1000"),
    ],
)
def test_what_cannot_be_shared_is_said_with_the_numbers(
    changes: dict[str, int], ranks: int, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(replace(SMOLLM2, **changes), ranks, "engine.decode_tensor_parallel")
    assert caught.value.message.startswith("engine.decode_tensor_parallel: ")
    assert why in caught.value.message
