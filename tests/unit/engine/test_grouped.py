"""Weights that stay as a GGUF file quantises them."""

import gguf
import numpy as np
import pytest
import torch

from engine.gguf_file import GgufFile
from engine.gguf_groups import grouped_model
from engine.grouped import GroupedKind, GroupedWeight
from engine.native.build import NativeUnavailable, ensure_built
from engine.native.grouped import GroupedLinear
from engine.native.kernels import NativeKernels


def quantised(kind: GroupedKind, outputs: int, inputs: int, seed: int = 0) -> GroupedWeight:
    numbers = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    rows = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind.value])
    return GroupedWeight(kind=kind, shape=(outputs, inputs), rows=rows)


def dequantised(weight: GroupedWeight) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[weight.kind.value]
    return torch.from_numpy(gguf.quants.dequantize(weight.rows, kind))


@pytest.fixture
def kernels() -> NativeKernels:
    try:
        return NativeKernels(ensure_built(), torch.bfloat16, grouped_rows=4)
    except NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.mark.parametrize("kind", GroupedKind)
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_are_multiplied_with_weights_that_nobody_rounded(
    kernels: NativeKernels, kind: GroupedKind, biased: bool
) -> None:
    weight = quantised(kind, 96, 160)
    exact = dequantised(weight).double()
    bias = torch.randn(96).bfloat16() if biased else None
    linear = kernels.linear(exact.bfloat16(), bias, groups=weight)
    rows = torch.randn(20, 160).bfloat16()
    expected = rows.double() @ exact.T + (0.0 if bias is None else bias.double())

    assert isinstance(linear, GroupedLinear)
    for count in range(1, 5):
        few = linear(rows[:count], torch.float32)
        torch.testing.assert_close(few.double(), expected[:count], atol=1e-4, rtol=1e-5)
        assert torch.equal(few[:1], linear(rows[:1], torch.float32))
        assert torch.equal(linear(rows[:count]), few.bfloat16())
    torch.testing.assert_close(linear(rows).double(), expected, atol=0.3, rtol=0.02)
    ids = torch.tensor([95, 0, 40])
    assert torch.equal(linear.gather(ids), exact.bfloat16()[ids])


def test_nothing_stays_quantised_in_float32_or_where_panels_are_not_full(
    kernels: NativeKernels,
) -> None:
    weight = quantised(GroupedKind.Q8_0, 40, 32)
    assert not isinstance(
        kernels.linear(dequantised(weight).bfloat16(), groups=weight), GroupedLinear
    )
    weight = quantised(GroupedKind.Q8_0, 32, 32)
    exact = NativeKernels(ensure_built(), torch.float32, grouped_rows=4)
    assert not isinstance(exact.linear(dequantised(weight), groups=weight), GroupedLinear)


class FakeTensor:
    """What the reader of a GGUF file has of a tensor."""

    def __init__(self, weight: GroupedWeight) -> None:
        self.tensor_type = gguf.GGMLQuantizationType[weight.kind.value]
        self.shape = weight.shape[::-1]
        self.data = weight.rows


def test_parts_of_one_kind_are_merged_and_others_are_left_out() -> None:
    def part(seed: int, kind: GroupedKind = GroupedKind.Q4_1) -> GroupedWeight:
        return quantised(kind, 32, 64, seed)

    parts = {
        "blk.0.attn_q": part(1),
        "blk.0.attn_k": part(2),
        "blk.0.attn_v": part(3),
        "blk.0.ffn_gate": part(4),
        "blk.0.ffn_up": part(5, GroupedKind.Q8_0),
        "token_embd": part(6, GroupedKind.Q8_0),
    }
    tensors = {f"{name}.weight": FakeTensor(weight) for name, weight in parts.items()}
    file = GgufFile(path=None, metadata={}, tensors=tensors)

    found = grouped_model(file, 1, lambda name, rows: rows[::-1] if name == "attn_k" else rows)

    assert set(found.layers[0]) == {"qkv"}
    qkv = found.layers[0]["qkv"]
    assert qkv.shape == (96, 64)
    expected = [dequantised(part(1)), dequantised(part(2)).flip(0), dequantised(part(3))]
    assert torch.equal(dequantised(qkv), torch.cat(expected))
    assert found.head is not None and found.head.kind is GroupedKind.Q8_0
