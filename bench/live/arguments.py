"""What both benchmarks can be told, and its limits."""

import argparse
import math

from bench.load.workloads import Shape
from core.errors import InvalidRequest


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """With the flags that say how a request looks and how capacity is measured."""
    made = argparse.ArgumentParser(prog=f"python -m bench.live.{name}", description=description)
    made.add_argument("--input-len", type=int, default=512, help="tokens of a prompt")
    made.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    made.add_argument("--deadline-s", type=float, default=20.0, help="of every request")
    made.add_argument("--concurrency", type=int, default=16, help="users that find the capacity")
    made.add_argument("--capacity-requests", type=int, default=64, help="of these users together")
    return made


def positive(asked: argparse.Namespace, *names: str) -> None:
    """Raises InvalidRequest that names the flag."""
    for name in names:
        value = getattr(asked, name)
        if not (value > 0 and math.isfinite(value)):
            flag = "--" + name.replace("_", "-")
            raise InvalidRequest(f"{flag} must be positive, not {value:g}", field=name)


def shape(asked: argparse.Namespace) -> Shape:
    """Of every request. Raises InvalidRequest for what no load can be made of."""
    positive(asked, "input_len", "output_len", "deadline_s", "concurrency", "capacity_requests")
    if asked.capacity_requests < 3 * asked.concurrency:
        raise InvalidRequest(
            f"--capacity-requests must be at least three times --concurrency "
            f"({3 * asked.concurrency}), not {asked.capacity_requests}",
            field="capacity_requests",
        )
    return Shape(input_len=asked.input_len, output_len=asked.output_len)
