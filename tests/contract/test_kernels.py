"""What every kernel set computes: matrix products, norms, SwiGLU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import Kernels

from .kernel_sets import DTYPES, KERNEL_SETS, make_kernels, tolerance

Randn = Callable[..., Tensor]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=(*KERNEL_SETS, "triton"))
def kernels(request: pytest.FixtureRequest, dtype: torch.dtype) -> Kernels:
    return make_kernels(request.param, dtype)


@pytest.fixture
def randn(dtype: torch.dtype) -> Randn:
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("rows", [0, 1, 2, 13, 14, 15, 28, 29, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 24), (61, 40), (96, 576), (7, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_multiplies_and_adds_its_bias(
    kernels: Kernels,
    randn: Randn,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    biased: bool,
) -> None:
    weight, x = randn(outputs, inputs) / inputs**0.5, randn(rows, inputs)
    bias = randn(outputs) if biased else None
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()

    linear = kernels.linear(weight, bias)

    check(linear(x), expected, dtype)
    check(linear(x, torch.float32), expected, torch.float32) if dtype == torch.float32 else None
    assert linear(x, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("inputs", [24, 33])
def test_a_linear_gives_back_rows_of_its_weight(
    kernels: Kernels, randn: Randn, inputs: int
) -> None:
    weight = randn(61, inputs)
    expected = weight.clone()
    linear = kernels.linear(weight, lookup=True)
    ids = torch.tensor([60, 0, 31, 32, 33, 0])

    assert torch.equal(linear.gather(ids), expected[ids])
    for wrong in (61, -1):
        with pytest.raises(IndexError):
            linear.gather(torch.tensor([3, wrong]))


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("columns", [24, 576, 577])
def test_a_norm_adds_what_is_new_and_norms(
    kernels: Kernels, randn: Randn, dtype: torch.dtype, rows: int, columns: int
) -> None:
    hidden, delta, weight = randn(rows, columns), randn(rows, columns), randn(columns)
    plain, summed = hidden.clone(), hidden + delta

    def expected(x: Tensor) -> Tensor:
        x = x.double()
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    check(kernels.norm(hidden, weight, 1e-5), expected(plain), dtype)
    assert torch.equal(hidden, plain)
    check(kernels.norm(hidden, weight, 1e-5, delta), expected(summed), dtype)
    assert torch.equal(hidden, summed)


@pytest.mark.parametrize("inner", [16, 40, 1536])
def test_swiglu_is_silu_of_the_gate_times_up(
    kernels: Kernels, randn: Randn, dtype: torch.dtype, inner: int
) -> None:
    gate_up = randn(5, 2 * inner)
    gate_up[0, :4] = torch.tensor([-1e30, -200.0, 200.0, 0.0])
    gate, up = gate_up.double().chunk(2, dim=-1)

    check(kernels.swiglu(gate_up), gate * torch.sigmoid(gate) * up, dtype)
