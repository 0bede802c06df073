"""The Triton kernels against the textbook, in the interpreter: some shapes, and with `long` all."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from engine.attention import AttentionRow, Rotation
from engine.decode_tensors import DecodeTensors, block_table, slot_mapping
from engine.fp8_kv import pack
from engine.kv_cache import KvCache, KvSpec
from engine.triton import runtime
from engine.triton.attention import TritonAttention
from tests.contract.kernel_sets import DTYPES
from tests.contract.test_attention import Texts

CPU = torch.device("cpu")
# Few enough that contexts of one tile stay whole, many enough that longer ones are split.
NUM_SMS = 6

pytestmark = pytest.mark.skipif(
    not runtime.interpreted(), reason="on a GPU `make test-gpu` runs the kernels"
)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def check(
    dtype: torch.dtype,
    lengths: Sequence[int],
    *steps: Sequence[tuple[int, int, int]],
    shape: tuple[int, int, int] = (4, 2, 64),
    block_size: int = 16,
    normed: bool = False,
    fp8: bool = False,
) -> None:
    """Steps of parts (text, start, end) over a poisoned pool; `shape` is heads, KV heads, dims."""
    heads, kv_heads, head_dim = shape
    texts = Texts(
        dtype,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        normed=normed,
        fp8=fp8,
    )
    for parts in steps:
        texts.check(TritonAttention(CPU, num_sms=NUM_SMS), *parts)


@pytest.mark.parametrize(
    ("dtype", "shape", "block_size"),
    [
        (torch.float32, (6, 2, 64), 16),
        (torch.bfloat16, (4, 1, 128), 64),
        (torch.bfloat16, (2, 2, 80), 32),
    ],
    ids=str,
)
def test_chunks_and_single_tokens_share_a_step(
    dtype: torch.dtype, shape: tuple[int, int, int], block_size: int
) -> None:
    check(
        dtype,
        [block_size + 1, 90],
        [(0, 0, block_size), (1, 0, 66)],
        [(1, 66, 89), (0, block_size, block_size + 1)],
        [(1, 89, 90)],
        shape=shape,
        block_size=block_size,
    )


def test_heads_are_normed_before_they_turn(dtype: torch.dtype) -> None:
    check(dtype, [20], [(0, 0, 19)], [(0, 19, 20)], shape=(2, 1, 32), normed=True)


@pytest.mark.parametrize(
    ("dtype", "shape", "block_size"),
    [(torch.float32, (6, 2, 64), 16), (torch.bfloat16, (2, 2, 80), 32)],
    ids=str,
)
def test_kv_in_fp8_is_that_of_the_definition(
    dtype: torch.dtype, shape: tuple[int, int, int], block_size: int
) -> None:
    check(
        dtype,
        [block_size + 1, 70],
        [(0, 0, block_size), (1, 0, 66)],
        [(1, 66, 69), (0, block_size, block_size + 1)],
        shape=shape,
        block_size=block_size,
        fp8=True,
    )


@pytest.mark.parametrize("head_dim", [16, 80])
def test_heads_are_written_in_fp8_bit_for_bit(dtype: torch.dtype, head_dim: int) -> None:
    """Values are not turned: the kernel has the same numbers as the definition."""
    texts = Texts(dtype, [21], heads=4, kv_heads=2, head_dim=head_dim, block_size=4, fp8=True)
    # The interpreter reads bfloat16's least numbers wrongly.
    least = -38 if dtype == torch.float32 else -30
    for layer in range(2):  # and a head of zeros
        spread = torch.logspace(least, 4, 21)[:, None]
        texts.qkv[layer][0] = (texts.qkv[layer][0].float() * spread).to(dtype)
        texts.qkv[layer][0][7] = 0
    texts.step(TritonAttention(CPU, num_sms=NUM_SMS), (0, 0, 21))
    for layer in range(2):
        values = texts.qkv[layer][0].view(21, -1, head_dim)[:, 6:]
        for position in range(21):
            block, slot = texts.blocks[0][position // 4], position % 4
            assert torch.equal(texts.kv.pool[block, layer, 1, slot], pack(values[position]))


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_shape_in_fp8(dtype: torch.dtype, group: int, head_dim: int) -> None:
    check(
        dtype,
        [1, 17, 130],
        [(2, 0, 64), (0, 0, 1), (1, 0, 15)],
        [(2, 64, 129), (1, 15, 16)],
        [(2, 129, 130), (1, 16, 17)],
        shape=(2 * group, 2, head_dim),
        fp8=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_shape_with_ragged_texts(
    dtype: torch.dtype, group: int, head_dim: int, block_size: int
) -> None:
    check(
        dtype,
        [1, 16, 17, 65, 130],
        [(4, 0, 50), (0, 0, 1), (3, 0, 64), (1, 0, 15)],
        [(4, 50, 129), (1, 15, 16), (3, 64, 65), (2, 0, 17)],
        [(4, 129, 130)],
        shape=(2 * group, 2, head_dim),
        block_size=block_size,
    )


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 100])
def test_blocks_of_any_size(dtype: torch.dtype, block_size: int) -> None:
    check(dtype, [101, 70], [(0, 0, 99), (1, 0, 70)], [(0, 99, 101)], block_size=block_size)


@pytest.mark.long
def test_a_context_of_many_parts(dtype: torch.dtype) -> None:
    check(dtype, [1500], [(0, 0, 1499)], [(0, 1499, 1500)])


def test_rows_that_fill_a_batch_up_write_nothing_and_disturb_nobody() -> None:
    """What a captured graph computes: a batch of three with one sequence in it."""
    spec = KvSpec(
        num_blocks=4, num_layers=1, block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32
    )
    row = AttentionRow(start=5, num_tokens=1, block_ids=(2, 3))
    qkv = torch.randn((3, 3 * 16), generator=torch.Generator().manual_seed(3))
    angles = torch.ones((3, 8))
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())

    def pool() -> KvCache:
        kv = KvCache(spec)
        kv.pool.copy_(torch.randn(spec.shape, generator=torch.Generator().manual_seed(4)))
        return kv

    backend = TritonAttention(CPU, num_sms=NUM_SMS)
    alone, filled = pool(), pool()
    one = Rotation(cos=rotation.cos[:1], sin=rotation.sin[:1])
    expected = backend.begin(alone, [row], one)(0, qkv[:1].clone())
    tensors = DecodeTensors(
        slot_mapping=torch.tensor([*slot_mapping([row], 4), -1, -1]),
        block_table=torch.zeros((3, 2), dtype=torch.int32),
        context_lens=torch.tensor([6, 0, 0], dtype=torch.int32),
    )
    tensors.block_table[:1] = torch.from_numpy(block_table([row], 4))
    mixed = backend.begin_decode(filled, tensors, rotation)(0, qkv.clone())

    assert torch.equal(mixed[:1], expected)
    assert torch.equal(filled.pool, alone.pool)


def test_a_block_that_is_not_the_pools_is_refused() -> None:
    spec = KvSpec(
        num_blocks=2, num_layers=1, block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32
    )
    rotation = Rotation(cos=torch.ones(1, 8), sin=torch.zeros(1, 8))
    for blocks, complaint in (((0, 2), "outside"), ((0,), "1 blocks for 5 tokens")):
        with pytest.raises(ValueError, match=complaint):
            row = AttentionRow(start=4, num_tokens=1, block_ids=blocks)
            TritonAttention(CPU).begin(KvCache(spec), [row], rotation)
