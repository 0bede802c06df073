"""Named workloads: pure functions from what was asked for to requests.

`lengths` and `texts` are two sources of chance, so that arms and rounds which are compared get
prompts of the same lengths and different contents: no cache helps unless the workload is about it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.load.prompts import chat_questions, problems, sample, worked_examples
from bench.load.request import LoadRequest
from bench.load.traces import fitting, read_lengths
from core.errors import InvalidRequest

DEFAULT_INPUT_LEN = 512
DEFAULT_OUTPUT_LEN = 64
DEFAULT_TRACE = "azure-conv"
# Neither the control tokens of the usual vocabularies, which stand at their beginning (up to 1,000)
# or at their end, nor beyond the smallest of them (32,000).
ORDINARY_TOKENS = (1000, 30000)
_NUM_EXAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a workload may be told; None where it was not, for what the workload has by itself.

    `data` is a folder of public traces and question sets (docs/benchmarks.md).
    """

    input_len: int | None = None
    output_len: int | None = None
    trace: str | None = None
    length_scale: float | None = None
    data: Path | None = None
    token_ids: tuple[int, int] = ORDINARY_TOKENS
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Where chance comes from. `shared` names what is common to warm-up and measured requests."""

    lengths: str
    texts: str
    shared: str


Make = Callable[[Shape, int, Seeds], list[LoadRequest]]


def _random(shape: Shape, count: int, seeds: Seeds) -> list[LoadRequest]:
    chance = random.Random(seeds.texts)
    length, answer = input_len(shape), output_len(shape)
    return [
        LoadRequest(prompt=_ids(chance, shape, length), max_tokens=answer) for _ in range(count)
    ]


def _poisson(shape: Shape, count: int, seeds: Seeds) -> list[LoadRequest]:
    rows = read_lengths(shape.trace or DEFAULT_TRACE, shape.data)
    rows = fitting(rows, scale=shape.length_scale or 1.0, window=shape.window)
    if not rows:
        raise InvalidRequest(
            f"no request of the trace fits a window of {shape.window} tokens: "
            "--length-scale makes them shorter",
            field="length_scale",
        )
    lengths, texts = random.Random(seeds.lengths), random.Random(seeds.texts)
    return [
        LoadRequest(prompt=_ids(texts, shape, prompt), max_tokens=answer)
        for prompt, answer in lengths.choices(rows, k=count)
    ]


def _chat(shape: Shape, count: int, seeds: Seeds) -> list[LoadRequest]:
    questions = sample(random.Random(seeds.lengths), chat_questions(shape.data), count)
    texts = random.Random(seeds.texts)
    return [
        LoadRequest(prompt=f"{_tag(texts)} {question}", max_tokens=output_len(shape), chat=True)
        for question in questions
    ]


def _shared_prefix(shape: Shape, count: int, seeds: Seeds) -> list[LoadRequest]:
    examples = worked_examples(shape.data, _NUM_EXAMPLES)
    prefix = f"{_tag(random.Random(seeds.shared))}\n\n" + "".join(
        f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples
    )
    return [
        LoadRequest(prompt=f"{prefix}Question: {problem}\nAnswer:", max_tokens=output_len(shape))
        for problem in problems(shape.data, count, random.Random(seeds.lengths))
    ]


WORKLOADS: dict[str, Make] = {
    "random": _random,
    "chat": _chat,
    "shared-prefix": _shared_prefix,
    "poisson": _poisson,
}


def input_len(shape: Shape) -> int:
    """Tokens of each prompt, where they are all alike."""
    return shape.input_len or DEFAULT_INPUT_LEN


def output_len(shape: Shape) -> int:
    """Tokens of each answer, where they are all alike."""
    return shape.output_len or DEFAULT_OUTPUT_LEN


def _ids(chance: random.Random, shape: Shape, length: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(*shape.token_ids), k=length))


def _tag(chance: random.Random) -> str:
    """Begins a text as no other does, for about the same number of tokens each time."""
    return f"[{' '.join(str(chance.randrange(10)) for _ in range(8))}]"
