"""The flash adapter: every call as its package wants it, against a reference that checks it."""

import pytest
import torch

pytest.importorskip("triton")

from core.errors import ConfigError
from engine.attention import AttentionBackend, AttentionRow, Rotation
from engine.decode_tensors import DecodeTensors, block_table, slot_mapping
from engine.flash.attention import FlashAttention
from engine.flash.package import FlashUnavailable, describe, find_package
from engine.kernel_choice import choose_kernels
from engine.triton import runtime
from tests.contract.flash_reference import FlashAttn, VllmFlashAttn, VllmInside
from tests.contract.test_attention import Texts

BF16 = torch.bfloat16
PACKAGES = {
    "vllm_flash_attn": VllmFlashAttn,
    "vllm.vllm_flash_attn": VllmInside,
    "flash_attn": FlashAttn,
}

pytestmark = pytest.mark.skipif(
    not runtime.interpreted(), reason="on a GPU `make test-gpu` runs the kernels"
)


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def backend(package: str) -> AttentionBackend:
    return FlashAttention(describe(package, PACKAGES[package]))


@pytest.fixture
def block_size(package: str) -> int:
    return PACKAGES[package].multiple


def texts(lengths: list[int], block_size: int, normed: bool = False) -> Texts:
    return Texts(
        BF16, lengths, heads=4, kv_heads=2, head_dim=16, block_size=block_size, normed=normed
    )


def test_chunks_alone_single_tokens_alone_and_both(
    backend: AttentionBackend, block_size: int
) -> None:
    some = texts([1, 17, 40, 33], block_size)
    some.check(backend, (2, 0, 30), (1, 0, 16), (3, 0, 32))
    some.check(backend, (2, 30, 31), (0, 0, 1), (1, 16, 17))
    some.check(backend, (2, 31, 39), (3, 32, 33))
    some.check(backend, (2, 39, 40))


def test_heads_are_normed_before_they_turn(backend: AttentionBackend, block_size: int) -> None:
    some = texts([20], block_size, normed=True)
    some.check(backend, (0, 0, 19))
    some.check(backend, (0, 19, 20))


def test_a_replay_reads_what_its_tensors_hold_by_then(
    backend: AttentionBackend, block_size: int
) -> None:
    some = texts([20], block_size)
    some.check(backend, (0, 0, 19))
    row = AttentionRow(start=19, num_tokens=1, block_ids=some.blocks[0])
    tensors = DecodeTensors(
        slot_mapping=torch.full((2,), -1),
        block_table=torch.zeros((2, 3), dtype=torch.int32),
        context_lens=torch.zeros(2, dtype=torch.int32),
    )
    angles = some.angles[[19, 0]]
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    step = backend.begin_decode(some.kv, tensors, rotation)
    tensors.slot_mapping[:1] = torch.from_numpy(slot_mapping([row], block_size))
    tensors.block_table[:1] = torch.from_numpy(block_table([row], block_size, 3))
    tensors.context_lens[0] = 20

    qkv = torch.cat((some.qkv[0][0][19:], some.qkv[0][0][:1]))
    mixed = step(0, qkv)

    torch.testing.assert_close(mixed[0].double(), some.expected[0][0][19], atol=3e-2, rtol=2e-2)


def test_what_a_package_cannot_compute_is_refused_with_the_numbers(package: str) -> None:
    found = describe(package, PACKAGES[package])
    for wrong, complaint in (
        ({"dtype": torch.float32}, "engine.dtype is float32"),
        ({"head_dim": 320}, "heads of 320 dims"),
        ({"head_dim": 84}, "heads of 84 dims"),
        ({"block_size": 24}, f"a multiple of {found.block_multiple} tokens; .* is 24"),
    ):
        with pytest.raises(FlashUnavailable, match=complaint):
            found.check(**{"dtype": BF16, "head_dim": 64, "block_size": 256} | wrong)


def test_the_reference_finds_wrong_calls() -> None:
    pool = torch.zeros((2, 16, 1, 16), dtype=BF16)
    right = {
        "q": torch.zeros((1, 1, 2, 16), dtype=BF16),
        "k_cache": pool,
        "v_cache": pool,
        "cache_seqlens": torch.tensor([5], dtype=torch.int32),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "softmax_scale": 0.25,
        "causal": True,
    }
    VllmFlashAttn.flash_attn_with_kvcache(**right)
    for wrong in (
        {"q": torch.zeros((1, 2, 16), dtype=BF16)},
        {"k_cache": pool.float()},
        {"k_cache": pool.transpose(1, 3).contiguous().transpose(1, 3)},
        {"cache_seqlens": torch.tensor([5])},
        {"cache_seqlens": torch.tensor([17], dtype=torch.int32)},
        {"block_table": torch.tensor([[2]], dtype=torch.int32)},
        {"causal": False},
    ):
        with pytest.raises(AssertionError):
            VllmFlashAttn.flash_attn_with_kvcache(**right | wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    with pytest.raises(FlashUnavailable, match="it needs a GPU"):
        find_package(torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"engine\.attention: flash cannot be had: it needs a GPU"
    ):
        choose_kernels("auto", BF16, 64, attention="flash")
