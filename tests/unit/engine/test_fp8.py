"""FP8 products: how far from exact they may be; that the library's are those that are defined."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import ConfigError
from engine.fp8 import Fp8Linear, check_fp8, others_on
from engine.fp8_numbers import LARGEST, quantise
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.runner import ModelRunner
from tests.unit.engine.test_paged_model import CONFIG, random_weights

BF16 = torch.bfloat16
CPU = torch.device("cpu")
SIZES = replace(CONFIG, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=48)


def randn(*shape: int, seed: int = 1) -> Tensor:
    # Of magnitudes from one to a thousand, so that small ones stand beside large ones.
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (3 * torch.rand(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * spread).to(BF16)


def defined(rows: Tensor, weight: Tensor) -> Tensor:
    """The numbers, in float64: FP8 times FP8, summed, times both scales."""
    x, x_scales = quantise(rows)
    w, w_scales = quantise(weight)
    return (x.double() @ w.double().T) * x_scales.double() * w_scales.double().T


def test_the_largest_of_a_row_is_the_largest_there_is_and_zeros_stay() -> None:
    rows = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0], [1e30, 1e-30, -1e30]])
    numbers, scales = quantise(rows)
    assert numbers.float()[0].tolist() == [LARGEST / 4, -LARGEST, LARGEST / 2]
    assert numbers.float()[1].tolist() == [0.0] * 3
    assert scales[1].item() == 1.0
    assert numbers.float()[2].tolist() == [LARGEST, 0.0, -LARGEST]


def test_a_number_is_off_by_a_sixteenth_of_it_or_half_the_smallest_step() -> None:
    rows = randn(64, 96)
    numbers, scales = quantise(rows)
    error = (numbers.double() * scales.double() - rows.double()).abs()
    bound = torch.maximum(rows.double().abs() / 16, scales.double() * 2.0**-10)
    assert bool((error <= bound * (1 + 1e-6)).all())


@pytest.mark.parametrize("shape", [(1, 16, 16), (5, 48, 96), (33, 64, 32)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_that_are_defined(shape: tuple[int, int, int], biased: bool) -> None:
    num_rows, outputs, inputs = shape
    rows, weight = randn(num_rows, inputs), randn(outputs, inputs, seed=2)
    bias = randn(outputs, seed=3) if biased else None
    expected = defined(rows, weight)
    # Rounded to bfloat16 once, and with a bias again; sums in another order in float32.
    sizes = (rows.double().abs() @ weight.double().abs().T) * 1e-5
    bound = 2.0**-8 * expected.abs() + sizes
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + 2.0**-8 * expected.abs()
    actual = Fp8Linear(weight, bias, CPU)(rows)
    assert actual.dtype == BF16
    assert bool(((actual.double() - expected).abs() <= bound).all())


def test_products_are_near_the_exact_ones() -> None:
    rows, weight = randn(16, 256), randn(64, 256, seed=2)
    exact = rows.double() @ weight.double().T
    sizes = rows.double().abs() @ weight.double().abs().T
    error = (Fp8Linear(weight, None, CPU)(rows).double() - exact).abs()
    # Each factor is off by a sixteenth at most, and errors of many cancel.
    assert bool((error <= sizes * (2 / 16 + 1 / 256 + 2.0**-8)).all())
    assert float((error / sizes).mean()) < 0.01


def test_rows_of_the_weight_are_given_back_as_they_were_quantised() -> None:
    weight = randn(32, 16)
    numbers, scales = quantise(weight)
    linear = Fp8Linear(weight.clone(), None, CPU)
    ids = torch.tensor([31, 0, 0])
    assert torch.equal(linear.gather(ids), (numbers.float() * scales)[ids].to(BF16))
    with pytest.raises(IndexError):
        linear.gather(torch.tensor([32]))


def test_what_cannot_be_computed_is_refused_in_one_line() -> None:
    check_fp8(SIZES, BF16, None)
    check_fp8(SIZES, BF16, (9, 0))
    for config, dtype, capability, complaint in (
        (SIZES, torch.float32, None, "for engine.dtype bfloat16"),
        (SIZES, BF16, (8, 0), r"needs compute capability 8\.9; this GPU has 8\.0"),
        (replace(SIZES, hidden_size=24), BF16, None, "hidden_size is 24"),
        (replace(SIZES, head_dim=4), BF16, None, r"num_kv_heads \* head_dim is 8"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_fp8(config, dtype, capability)


def test_everything_but_the_layers_matrices_moves_before_they_are_quantised() -> None:
    moved = others_on(random_weights(), torch.device("meta"))
    for part in (moved.embedding, moved.head, moved.final_norm, moved.layers[0].input_norm):
        assert part.device.type == "meta"
    assert moved.layers[0].qkv.device.type == "cpu"


def test_workers_of_other_weights_do_not_hand_over_to_each_other() -> None:
    plain, fp8 = EngineConfig(), EngineConfig(quantisation="fp8")
    assert plain.numbers == "bfloat16"
    assert fp8.numbers != plain.numbers


def test_a_model_with_fp8_layers_is_near_the_one_without() -> None:
    generator = torch.Generator().manual_seed(9)
    weights = random_weights()

    def grown(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5).to(BF16)

    def make(fp8: bool) -> ModelRunner:
        generator.manual_seed(9)
        layers = tuple(
            replace(
                layer,
                input_norm=torch.ones(32, dtype=BF16),
                post_norm=torch.ones(32, dtype=BF16),
                qkv=grown((64, 32)),
                output=grown((32, 32)),
                gate_up=grown((96, 32)),
                down=grown((32, 48)),
            )
            for layer in weights.layers
        )
        changed = replace(
            weights,
            layers=layers,
            embedding=grown((61, 32)) * 8,
            head=grown((61, 32)),
            final_norm=torch.ones(32, dtype=BF16),
        )
        kernels = choose_kernels("torch", BF16, SIZES.head_dim)
        linear = (lambda weight, bias: Fp8Linear(weight, bias, CPU)) if fp8 else None
        model = LlamaModel(SIZES, changed, kernels, layer_linear=linear)
        spec = KvSpec(
            num_blocks=8, num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=BF16
        )
        return ModelRunner(model, KvCache(spec))

    plain, fp8 = (make(which).logits(_prompt()) for which in (False, True))
    similarity = torch.nn.functional.cosine_similarity(plain, fp8)
    assert float(similarity.min()) > 0.99
    assert not torch.equal(plain, fp8)


def _prompt():
    from core.messages import SamplingParams, TransferId
    from engine.sequence import SequenceKey
    from engine.step_batch import BatchItem, SampleRequest, StepBatch

    item = BatchItem(
        key=SequenceKey(TransferId(request_id="r", attempt=0)),
        start=0,
        token_ids=tuple(range(20)),
        block_ids=tuple(range(5)),
        sample=SampleRequest(params=SamplingParams(), position=20),
    )
    return StepBatch(items=(item,))
