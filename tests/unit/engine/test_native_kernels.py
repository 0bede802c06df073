"""What the native kernels promise beyond the contract: bits that do not depend on company."""

from pathlib import Path

import pytest
import structlog
import torch

from core.errors import ConfigError
from engine.attention import AttentionRow, Rotation
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.native import build
from engine.native.build import NativeUnavailable, ensure_built
from engine.native.kernels import NativeKernels
from engine.torch_kernels import TorchKernels


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def kernels(dtype: torch.dtype) -> NativeKernels:
    try:
        return NativeKernels(ensure_built(), dtype)
    except NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")


def test_a_row_of_a_product_has_the_same_bits_in_every_batch(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    linear = kernels.linear(torch.randn(100, 576).to(dtype))
    rows = torch.randn(60, 576).to(dtype)
    alone = torch.cat([linear(row[None]) for row in rows])

    assert all(torch.equal(linear(rows[:count]), alone[:count]) for count in range(1, 61))


def test_attention_has_the_same_bits_in_every_chunk_and_batch(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    length, heads, kv_heads, head_dim = 150, 6, 2, 32
    spec = KvSpec(
        num_blocks=32,
        num_layers=1,
        block_size=16,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    kv = KvCache(spec)
    qkv = torch.randn(length, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.randn(length, head_dim // 2)
    other = torch.randn_like(qkv)

    def computed(*cuts: int, shared: bool = False) -> torch.Tensor:
        parts = []
        for start, end in zip((0, *cuts), (*cuts, length), strict=True):
            kv_rows = [
                AttentionRow(start=start, num_tokens=end - start, block_ids=tuple(range(10)))
            ]
            chosen, turned = qkv[start:end], angles[start:end]
            if shared:  # another text of the same positions goes first
                kv_rows.insert(
                    0,
                    AttentionRow(
                        start=start, num_tokens=end - start, block_ids=tuple(range(10, 20))
                    ),
                )
                chosen, turned = torch.cat((other[start:end], chosen)), turned.repeat(2, 1)
            rotation = Rotation(cos=turned.cos(), sin=turned.sin())
            step = kernels.attention.begin(kv, kv_rows, rotation)
            parts.append(step(0, chosen.clone())[start - end :])
        return torch.cat(parts)

    whole = computed()
    assert torch.equal(computed(63, 64, 65, 130), whole)
    assert torch.equal(computed(*range(1, length)), whole)
    assert torch.equal(computed(7, 100, 101, shared=True), whole)


def test_two_threads_compute_the_bits_of_one(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, rows = torch.randn(200, 64).to(dtype), torch.randn(20, 64).to(dtype)
    linear = kernels.linear(weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear(rows)
        torch.set_num_threads(2)
        assert torch.equal(linear(rows), one)
    finally:
        torch.set_num_threads(threads)


def test_one_openmp_runtime_serves_torch_and_the_kernels(kernels: NativeKernels) -> None:
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(runtimes) == 1


def test_blocks_that_the_pool_has_not_are_refused(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    spec = KvSpec(
        num_blocks=4, num_layers=1, block_size=16, num_kv_heads=1, head_dim=16, dtype=dtype
    )
    rotation = Rotation(cos=torch.ones(17, 8), sin=torch.zeros(17, 8))
    for block_ids in ((0,), (0, 4), (0, -1)):
        row = AttentionRow(start=0, num_tokens=17, block_ids=block_ids)
        with pytest.raises(ValueError, match="block"):
            kernels.attention.begin(KvCache(spec), [row], rotation)


def test_torch_takes_their_place_where_they_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "_CPU_FLAGS", ("avx1024",))

    with structlog.testing.capture_logs() as lines:
        chosen = choose_kernels("auto", torch.bfloat16, 64)

    assert isinstance(chosen, TorchKernels)
    assert [line["why"] for line in lines if "why" in line] == ["the CPU has no avx1024"]
    with pytest.raises(ConfigError, match=r"engine\.kernels: .*avx1024"):
        choose_kernels("native", torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="heads of 512 dims"):
        choose_kernels("native", torch.bfloat16, 512)


def test_a_build_that_fails_says_the_compilers_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        ensure_built()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int main( { }\n")
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr(build.sys, "prefix", str(tmp_path))

    with pytest.raises(NativeUnavailable, match=r"broken\.cpp.*error"):
        ensure_built()
    assert not list(tmp_path.glob("share/tandem-native/*.so"))
