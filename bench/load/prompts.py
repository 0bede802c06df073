"""Texts to ask with: public question sets where they lie, else made here."""

import json
import random
from pathlib import Path
from typing import Any

from core.errors import InvalidRequest

_CHAT_FILES = ("prompts/mt_bench_question.jsonl", "prompts/vicuna_bench_question.jsonl")
_EXAMPLES_FILE = "prompts/gsm8k_train_first500.jsonl"
_PROBLEMS_FILE = "prompts/gsm8k_test.jsonl"

_TASKS = (
    "Explain {} to a child of ten.",
    "Write a short letter to a friend about {}.",
    "List the arguments for and against {}.",
    "What should somebody know who begins with {}?",
    "Tell the history of {} in a few sentences.",
    "Plan an afternoon about {} for a class of twenty.",
)
_TOPICS = (
    "tides",
    "bread baking",
    "railway signals",
    "the printing press",
    "bees",
    "chess",
    "rainbows",
    "city markets",
    "sailing boats",
    "volcanoes",
    "mountain paths",
    "clockwork",
    "public libraries",
)
_NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emeka", "Freya", "Goro", "Hana")
_GOODS = ("pears", "candles", "notebooks", "lamps", "ropes", "stamps", "kites", "bricks")


def chat_questions(data: Path | None) -> list[str]:
    """Opening questions of conversations, those of MT-Bench and Vicuna's set if `data` has them."""
    if data is None:
        return [task.format(topic) for topic in _TOPICS for task in _TASKS]
    return [turns[0] for name in _CHAT_FILES for (turns,) in read_jsonl(data / name, "turns")]


def worked_examples(data: Path | None, count: int) -> list[tuple[str, str]]:
    """Problems with their solutions, GSM8K's if `data` has them. The same ones each time."""
    if data is not None:
        rows = read_jsonl(data / _EXAMPLES_FILE, "question", "answer")
        return [(question, answer) for question, answer in rows[:count]]
    chance = random.Random("examples")
    return [_problem(chance) for _ in range(count)]


def problems(data: Path | None, count: int, chance: random.Random) -> list[str]:
    """Problems to solve, no two alike while there are enough."""
    if data is None:
        return [_problem(chance)[0] for _ in range(count)]
    rows = read_jsonl(data / _PROBLEMS_FILE, "question")
    return sample(chance, [question for (question,) in rows], count)


def sample(chance: random.Random, items: list[str], count: int) -> list[str]:
    """So many of them in random order; where there are too few, all are taken again."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += chance.sample(items, min(len(items), count - len(drawn)))
    return drawn


def read_jsonl(path: Path, *fields: str) -> list[tuple[Any, ...]]:
    """These fields of each line's object. Raises InvalidRequest that names the file."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        return [tuple(row[field] for field in fields) for row in rows]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="data") from error
    except (ValueError, LookupError, TypeError) as error:
        wanted = ", ".join(fields)
        raise InvalidRequest(f"{path} is not JSON lines with {wanted}", field="data") from error


def _problem(chance: random.Random) -> tuple[str, str]:
    buyer, friend = chance.sample(_NAMES, 2)
    goods, others = chance.sample(_GOODS, 2)
    boxes, each, given, price = (chance.randrange(3, 40) for _ in range(4))
    left = boxes * each - min(given, boxes * each)
    return (
        f"{buyer} has {boxes} boxes with {each} {goods} in each, and no {others}. {buyer} gives "
        f"{min(given, boxes * each)} {goods} to {friend} and sells the rest for {price} coins a "
        f"piece. How many coins does {buyer} get?",
        f"There are {boxes} x {each} = {boxes * each} {goods}. {left} are left after the gift. "
        f"They bring {left} x {price} = {left * price} coins.\nThe answer is {left * price}.",
    )
