"""KV in FP8: what is stored, how far it is from exact, and that it is rounded once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.config import ClusterConfig, EngineConfig
from core.errors import ConfigError, Incompatible
from core.messages import Compatibility, SamplingParams, TransferId
from core.model_settings import ModelSettings
from engine.fp8_kv import SCALE_BYTES, pack, unpack
from engine.fp8_numbers import FP8
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.loader import kv_spec
from engine.parallel.shard import Shard
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch
from kv_transfer.compatibility import LAYOUT, PROTOCOL_VERSION, check_compatible
from kv_transfer.layout import KvLayout, byte_ranges
from tests.unit.engine.test_paged_model import BLOCK_SIZE, CONFIG, random_weights, text

IN_FP8 = EngineConfig(kv_cache_dtype="fp8_e4m3", block_size=BLOCK_SIZE)


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_number_is_off_by_a_sixteenth_of_it_or_half_the_smallest_step(dtype: torch.dtype) -> None:
    heads = (randn(50, 3, 64) * 10 ** (6 * torch.rand(50, 3, 1) - 3)).to(dtype)
    stored = pack(heads)
    assert stored.dtype == torch.uint8
    assert stored.shape == (50, 3, 64 + SCALE_BYTES)
    read = unpack(stored, torch.float32)
    largest = heads.double().abs().amax(-1, keepdim=True)
    bound = torch.maximum(heads.double().abs() / 16, largest / 448 * 2.0**-10)
    assert bool(((read.double() - heads.double()).abs() <= bound * (1 + 1e-6)).all())


def test_the_largest_of_a_head_and_zeros_stay_as_they_are() -> None:
    heads = torch.tensor([[0.0, -0.0, 0.0, 0.0], [448.0, -1.0, 2.0, 0.0], [-7.0, 3.5, 0.0, 7.0]])
    assert torch.equal(unpack(pack(heads), torch.float32), heads)
    least = torch.full((1, 4), 2.0**-149)  # no scale is so small; it is read as nothing
    assert torch.equal(unpack(pack(least), torch.float32), torch.zeros(1, 4))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_by_who_reads_it(odd: float) -> None:
    heads = torch.ones(2, 4)
    heads[0, 1] = odd
    read = unpack(pack(heads), torch.float32)
    assert bool(read[0, 1].isnan())
    assert torch.equal(read[1], torch.ones(4))


def test_a_block_has_a_byte_for_each_number_and_a_scale_for_each_head() -> None:
    spec = kv_spec(CONFIG, IN_FP8, kv_bytes=10**6)
    assert spec.head_bytes == CONFIG.head_dim + SCALE_BYTES
    heads = 2 * CONFIG.num_layers * BLOCK_SIZE * CONFIG.num_kv_heads
    assert spec.block_bytes == heads * spec.head_bytes
    assert spec.num_blocks == 10**6 // spec.block_bytes
    assert KvCache(spec).pool.shape[-1] == spec.head_bytes


def test_heads_that_move_between_numbers_of_ranks_bring_their_scales() -> None:
    heads = randn(4, 16) * torch.tensor([[1.0], [10.0], [100.0], [1e3]])
    stored = pack(heads)  # one token's: two heads' keys, and their values
    one = KvLayout(ranks=1, num_layers=1, block_size=1, num_kv_heads=2, head_bytes=16 + SCALE_BYTES)
    two = one.with_ranks(2)
    source, target = stored.flatten(), torch.zeros(two.block_bytes, dtype=torch.uint8)
    for part in byte_ranges(one, two):
        target[part.target : part.target + part.size] = source[
            part.source : part.source + part.size
        ]
    read = unpack(target.view(4, -1), torch.float32)
    assert torch.equal(read, unpack(stored, torch.float32)[[0, 2, 1, 3]])


def test_workers_of_other_kv_do_not_hand_over_to_each_other() -> None:
    def said(config: EngineConfig) -> Compatibility:
        return Compatibility(
            model="m",
            revision="r",
            dtype=config.numbers,
            block_size=config.block_size,
            block_bytes=kv_spec(CONFIG, config).block_bytes,
            layout=LAYOUT,
            protocol=PROTOCOL_VERSION,
        )

    plain = said(EngineConfig(block_size=BLOCK_SIZE))
    check_compatible(said(IN_FP8), said(IN_FP8))
    with pytest.raises(Incompatible, match=r"^dtype: bfloat16 here, bfloat16, KV fp8_e4m3 there; "):
        check_compatible(plain, said(IN_FP8))


def logits(kv_dtype: torch.dtype, dtype: torch.dtype, cuts: tuple[int, ...]) -> Tensor:
    """Of a text's last token, computed in chunks that end at `cuts`, [vocabulary]."""
    kernels = choose_kernels("torch", dtype, CONFIG.head_dim, kv_fp8=kv_dtype == FP8)
    spec = KvSpec(
        num_blocks=16,
        num_layers=CONFIG.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        dtype=kv_dtype,
    )
    kv = KvCache(spec)
    kv.bytes.fill(0xFF)
    runner = ModelRunner(LlamaModel(CONFIG, random_weights(), kernels), kv)
    tokens = text(cuts[-1])
    for start, end in zip((0, *cuts), cuts, strict=False):
        item = BatchItem(
            key=SequenceKey(TransferId(request_id="r", attempt=0)),
            start=start,
            token_ids=tuple(tokens[start:end]),
            block_ids=(9, 3, 12, 0, 5, 15, 1, 7, 2, 4),
            sample=SampleRequest(params=SamplingParams(), position=end),
        )
        with torch.inference_mode():
            made = runner.logits(StepBatch(items=(item,)))
    return made[0].clone()


def test_logits_are_near_those_of_kv_in_float32() -> None:
    errors, spreads = [], []
    for length in (1, 2, 17, 37):
        exact = logits(torch.float32, torch.float32, (length,))
        errors.append((logits(FP8, torch.float32, (length,)) - exact).abs().mean())
        spreads.append(exact.std())
    # Keys and values are off by 2 % on average.
    assert float(torch.stack(errors).mean() / torch.stack(spreads).mean()) < 0.05


@pytest.mark.parametrize("cuts", [(16, 37), (1, 2, 3, 37), (8, 36, 37)])
def test_how_a_prompt_is_cut_changes_nothing_since_kv_is_rounded_once(
    cuts: tuple[int, ...],
) -> None:
    whole, cut = logits(FP8, torch.float32, (37,)), logits(FP8, torch.float32, cuts)
    torch.testing.assert_close(cut, whole, atol=1e-4, rtol=1e-4)


def test_who_reads_it_and_who_is_refused() -> None:
    assert choose_kernels("torch", torch.bfloat16, 64, kv_fp8=True).attention.name == "torch"
    with pytest.raises(ConfigError, match=r"attention: flash .* KV .*engine\.kv_cache_dtype"):
        choose_kernels("auto", torch.bfloat16, 64, attention="flash", kv_fp8=True)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .* multiple of 4 dims; .* have 6"):
        kv_spec(replace(CONFIG, head_dim=6), IN_FP8)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype"):
        ClusterConfig.validated({"engine": {"kv_cache_dtype": "fp8"}}, source="t")


def test_a_rank_has_its_own_heads() -> None:
    one, two = kv_spec(CONFIG, IN_FP8), kv_spec(CONFIG, IN_FP8, ranks=2)
    assert two.num_kv_heads == Shard(0, 2).config(CONFIG).num_kv_heads
    assert two.rank_bytes * 2 == two.block_bytes == one.block_bytes


def test_a_model_has_a_type_of_its_own() -> None:
    cluster = ClusterConfig(
        models=(ModelSettings(model="a"), ModelSettings(model="b", kv_cache_dtype="fp8_e4m3"))
    )
    assert [cluster.of_model(model).engine.kv_fp8 for model in cluster.models] == [False, True]
