"""How near the engine's steps come to what this machine can do, with each set of kernels.

`python -m bench.kernels` measures in every round, one after the other so that all meet the same
machine: the memory's bandwidth (summing 256 MB), the fastest bfloat16 matrix product, and with each
kernel set a decode step of 1, 8 and 32 sequences and prompts of 512 and 2,048 tokens in chunks of
512. Nothing can be faster than

    limit = max(bytes / bandwidth, flops / peak)

where bytes are every sequence's keys and values once and the weights once: two for each, or what a
GGUF file has where the kernels read that. Flops are two for each weight and token, and four for
each query head, its dims and a token that it sees; the last layer and the head count for the tokens
that are sampled only. The share is limit / time, and the median of the rounds' own. With one thread
times are its CPU time, which other work on the machine disturbs less; with more they are wall time.
Ends with one JSON line.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from core.config import DEFAULT_MODEL, EngineConfig
from core.messages import SamplingParams, TransferId
from core.model_card import ModelCard
from engine.gguf_weights import GgufSource
from engine.host import default_threads
from engine.kernel_choice import choose_kernels
from engine.kernels import Linear
from engine.kv_cache import KvCache
from engine.loader import kv_spec, load_engine_model, open_source
from engine.model_config import ModelConfig
from engine.prepare import prepare
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch

KERNELS: tuple[Literal["native", "torch"], ...] = ("native", "torch")
DECODES = (1, 8, 32)
PROMPTS = (512, 2048)
CONTEXT = 550  # tokens before each decode step
CHUNK = 512
_BANDWIDTH_BYTES = 256 * 2**20
_PEAK_SHAPES = ((112, 512, 512), (224, 3072, 576), (512, 1536, 576))  # rows, outputs, inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One thing to time: chunks of prompts, or a decode step."""

    name: str
    steps: tuple[StepBatch, ...]
    kv_tokens: int  # whose keys and values are read, at least
    seen: int  # pairs of a token and one that it attends to
    tokens: int
    sampled: int


@dataclass(slots=True, kw_only=True)
class Machine:
    """What one round found the machine to do."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(slots=True)
class Result:
    """Rounds of one load with one kernel set."""

    ms: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def loads(block_size: int) -> list[Load]:
    """Every load; their sequences lie in blocks of their own."""
    per_seq = -(-(CONTEXT + 1) // block_size)
    decodes = [
        Load(
            name=f"decode {count}",
            steps=(StepBatch(items=tuple(_item(i, CONTEXT, 1, per_seq) for i in range(count))),),
            kv_tokens=count * (CONTEXT + 1),
            seen=count * (CONTEXT + 1),
            tokens=count,
            sampled=count,
        )
        for count in DECODES
    ]
    prompts = [
        Load(
            name=f"prefill {length}",
            steps=tuple(
                StepBatch(items=(_item(0, start, CHUNK, length, sampled=start + CHUNK == length),))
                for start in range(0, length, CHUNK)
            ),
            kv_tokens=length,
            seen=length * (length + 1) // 2,
            tokens=length,
            sampled=1,
        )
        for length in PROMPTS
    ]
    return decodes + prompts


def _item(row: int, start: int, count: int, per_seq: int, *, sampled: bool = True) -> BatchItem:
    return BatchItem(
        key=SequenceKey(TransferId(request_id=f"{row}", attempt=0)),
        start=start,
        token_ids=tuple(
            5 + (7 * position + row) % 40_000 for position in range(start, start + count)
        ),
        block_ids=tuple(range(row * per_seq, (row + 1) * per_seq)),
        sample=SampleRequest(params=SamplingParams(temperature=0.0), position=start + count)
        if sampled
        else None,
    )


def quantised_bytes(card: ModelCard, config: ModelConfig) -> int:
    """Bytes that steps of few sequences save where they read weights as the file has them."""
    source = open_source(Path(card.source))
    if not isinstance(source, GgufSource):
        return 0
    groups = source.groups(config)
    weights = [weight for layer in groups.layers for weight in layer.values()]
    weights += [groups.head] if groups.head else []
    return sum(2 * math.prod(weight.shape) - weight.rows.nbytes for weight in weights)


def limit_s(load: Load, config: ModelConfig, machine: Machine, saved_bytes: int) -> float:
    """The time that no kernel can undercut."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = (heads + 2 * kv_heads) * dim * config.hidden_size
    rest = heads * dim * config.hidden_size + 3 * config.intermediate_size * config.hidden_size
    head = config.vocab_size * config.hidden_size
    layers = config.num_layers
    num_bytes = 2 * (layers * (qkv + rest) + head) * len(load.steps) - saved_bytes
    num_bytes += load.kv_tokens * layers * 2 * kv_heads * dim * 2
    flops = 2 * load.tokens * (layers * qkv + (layers - 1) * rest) + 2 * load.sampled * (
        rest + head
    )
    flops += 4 * layers * heads * dim * load.seen
    return max(num_bytes / machine.bytes_per_s, flops / machine.flops_per_s)


def measure_machine(
    memory: torch.Tensor, products: list[tuple[Linear, torch.Tensor, float]]
) -> Machine:
    """The best of some tries of each."""
    bandwidth = max(memory.nbytes / _seconds(memory.sum) for _ in range(3))
    peak = 0.0
    for linear, rows, flops in products:
        peak = max(peak, *(flops / _seconds(lambda: linear(rows)) for _ in range(8)))  # noqa: B023
    return Machine(bytes_per_s=bandwidth, flops_per_s=peak)


def _products() -> list[tuple[Linear, torch.Tensor, float]]:
    made = []
    for choice in KERNELS:
        kernels = choose_kernels("auto" if choice == "native" else choice, torch.bfloat16, 64)
        for rows, outputs, inputs in _PEAK_SHAPES:
            linear = kernels.linear(torch.randn(outputs, inputs).bfloat16())
            made.append(
                (linear, torch.randn(rows, inputs).bfloat16(), 2.0 * rows * outputs * inputs)
            )
    return made


def _seconds(work: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin_s = clock()
    work()
    return clock() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(default_threads())
    card = prepare(options.model)
    runners: dict[str, ModelRunner] = {}
    for choice in KERNELS:
        engine = EngineConfig(kernels=choice)
        loaded = load_engine_model(card, engine)
        spec = kv_spec(loaded.config, engine, 2**30)
        runners[choice] = ModelRunner(loaded.model, KvCache(spec))
    work = loads(spec.block_size)
    saved = quantised_bytes(card, loaded.config)
    memory = torch.ones(_BANDWIDTH_BYTES // 8, dtype=torch.int64)
    products = _products()
    results: dict[tuple[str, str], Result] = {
        (choice, load.name): Result() for choice in KERNELS for load in work
    }
    machines = []
    for round_number in range(options.rounds + 1):
        for kernels, runner in runners.items():
            for load in work:
                with torch.inference_mode():
                    machine = measure_machine(memory, products)
                seconds = _seconds(lambda: [runner.execute(step) for step in load.steps])  # noqa: B023
                if round_number == 0:  # warms up
                    continue
                machines.append(machine)
                result = results[kernels, load.name]
                result.ms.append(1e3 * seconds)
                few = kernels == "native" and load.tokens <= engine.quantised_rows
                limit = limit_s(load, loaded.config, machine, saved if few else 0)
                result.shares.append(limit / seconds)
    bandwidth = statistics.median(machine.bytes_per_s for machine in machines) / 1e9
    peak = statistics.median(machine.flops_per_s for machine in machines) / 1e9
    print(f"{torch.get_num_threads()} threads: {bandwidth:.1f} GB/s, {peak:.0f} GFLOP/s")
    print(f"{'':14}" + "".join(f"{choice + ' ms':>14}{'share':>8}" for choice in KERNELS))
    for load in work:
        cells = [results[choice, load.name] for choice in KERNELS]
        print(
            f"{load.name:14}"
            + "".join(
                f"{statistics.median(c.ms):14.1f}{statistics.median(c.shares):8.0%}" for c in cells
            )
        )
    report = {
        "gb_per_s": round(bandwidth, 2),
        "gflop_per_s": round(peak, 1),
        "threads": torch.get_num_threads(),
        "results": [
            {
                "kernels": kernels,
                "load": name,
                "ms": round(statistics.median(result.ms), 2),
                "share": round(statistics.median(result.shares), 3),
            }
            for (kernels, name), result in results.items()
        ],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
