"""What steps and copies reach of what the same GPU reached a moment before.

The ceilings are measured, not read off a data sheet: a device copy counts its bytes twice, read and
written; a product of two large matrices is torch's.
"""

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu.parts import blocks_for, pool, random_model, step
from bench.gpu.place import Place
from engine.graphs import DecodeGraphs
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvSpec
from engine.llama import LlamaModel
from engine.preflight import weight_bytes
from engine.runner import ModelRunner

_BF16 = torch.bfloat16


def measure(place: Place) -> dict[str, object]:
    """Every speed and its share of the ceiling. Takes a model's memory, and lets it go."""
    copy_bytes_per_s = _copy(place)
    flops_per_s = _product(place)
    config, device = place.model, place.device
    kernels = choose_kernels("triton", _BF16, config.head_dim, attention="auto", device=device)
    model = random_model(config, _BF16, device, kernels)
    per_row = blocks_for(place.context + 1)
    num_blocks = max(place.batch * per_row, blocks_for(place.prompt))
    runner = ModelRunner(model, pool(config, _BF16, device, num_blocks))
    runner.graphs = _graphs(place, runner, model)
    decode_s = _decode(place, runner, per_row)
    prefill_s = _prefill(place, runner)
    spec = runner.kv.spec
    decode_bytes = _decode_bytes(place, spec)
    prefill_flops = _prefill_flops(place)
    handoff_bytes_per_s = _handoff(place, runner)
    return {
        "attention": kernels.attention.name,
        "graphs": list(runner.graphs.sizes),
        "device_copy_gb_per_s": _round(copy_bytes_per_s / 1e9),
        "matrix_tflop_per_s": _round(flops_per_s / 1e12),
        "decode_ms": _round(1e3 * decode_s),
        "decode_gb_per_s": _round(decode_bytes / decode_s / 1e9),
        "decode_share_of_copy": _round(decode_bytes / decode_s / copy_bytes_per_s),
        "prefill_ms": _round(1e3 * prefill_s),
        "prefill_tflop_per_s": _round(prefill_flops / prefill_s / 1e12),
        "prefill_share_of_product": _round(prefill_flops / prefill_s / flops_per_s),
        "handoff_gb_per_s": _round(handoff_bytes_per_s / 1e9),
        "handoff_share_of_copy": _round(2 * handoff_bytes_per_s / copy_bytes_per_s),
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _seconds(place: Place, work: Callable[[], object]) -> float:
    """The median of some tries, each awaited, after one that warms up."""
    times = []
    for _ in range(place.tries + 1):
        place.settle()
        begin_s = time.perf_counter()
        work()
        place.settle()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])


def _copy(place: Place) -> float:
    """Bytes a second of a device copy, read and written."""
    source = torch.ones(2**16 if place.dry else 2**32, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(place, lambda: target.copy_(source))


def _product(place: Place) -> float:
    """FLOP/s of a product of two matrices."""
    size = 64 if place.dry else 8192
    left, right = (torch.randn((size, size), device=place.device).to(_BF16) for _ in range(2))
    return 2 * size**3 / _seconds(place, lambda: left @ right)


def _graphs(place: Place, runner: ModelRunner, model: LlamaModel) -> DecodeGraphs:
    kv = runner.kv
    made = DecodeGraphs(
        lambda inputs: model.forward_decode(inputs, kv),
        kv,
        max_seqs=place.batch,
        window=place.context + 1,
        capture=place.capture(),
    )
    with torch.inference_mode():
        made.capture_all()
    return made


def _decode(place: Place, runner: ModelRunner, per_row: int) -> float:
    parts = [(row, place.context, [3 + row]) for row in range(place.batch)]
    batch = step(*parts, per_row=per_row)
    return _seconds(place, lambda: runner.execute(batch))


def _prefill(place: Place, runner: ModelRunner) -> float:
    tokens = [3 + i % 90 for i in range(place.prompt)]
    batch = step((0, 0, tokens), per_row=blocks_for(place.prompt))
    return _seconds(place, lambda: runner.execute(batch))


def _decode_bytes(place: Place, spec: KvSpec) -> float:
    """Weights but the embedding table, and every context's keys and values."""
    config = place.model
    weights = weight_bytes(config, 2) - 2 * config.vocab_size * config.hidden_size
    return weights + place.batch * (place.context + 1) * spec.block_bytes / spec.block_size


def _prefill_flops(place: Place) -> float:
    config = place.model
    heads = config.num_heads * config.head_dim
    qkv = (heads + 2 * config.num_kv_heads * config.head_dim) * config.hidden_size
    layer = qkv + heads * config.hidden_size + 3 * config.intermediate_size * config.hidden_size
    pairs = place.prompt * (place.prompt + 1) / 2
    products = 2.0 * config.num_layers * layer * place.prompt
    head = 2.0 * config.vocab_size * config.hidden_size
    return products + head + 4.0 * config.num_layers * heads * pairs


def _handoff(place: Place, runner: ModelRunner) -> float:
    """Bytes a second of whole blocks from one pool to another on the same device, one by one."""
    source = runner.kv.pool.view(runner.kv.spec.num_blocks, -1)
    count = min(place.copied_blocks, len(source) // 2)

    def work() -> None:
        for i in range(count):
            source[len(source) - 1 - i].copy_(source[i], non_blocking=True)

    return count * runner.kv.spec.block_bytes / _seconds(place, work)
