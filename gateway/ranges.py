"""The range and the default of each number of a request: what is checked, and what is documented.

`gateway.validation` holds requests against these, for HTTP and gRPC alike, and `gateway.openapi`
writes them into /openapi.json, so that the two cannot differ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From `low` to `high`, both included unless `above` leaves `low` out. None: no bound."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    # What an absent value means; None where that depends on the request.
    default: float | None = None
    # What a value at the bottom means, for whoever is told that one below is wrong.
    bottom: str = ""

    def check(self, field: str, value: float | None) -> None:
        """Raises InvalidRequest naming the field. None is in every range."""
        if value is None:
            return
        if not math.isfinite(value):
            raise InvalidRequest("must be a finite number", field=field)
        too_low = self.low is not None and (value < self.low or (self.above and value == self.low))
        if too_low or (self.high is not None and value > self.high):
            raise InvalidRequest(f"must be {self.words}", field=field)

    @property
    def words(self) -> str:
        """Such as "at least 0 and at most 2"."""
        parts = []
        if self.low is not None:
            parts.append(f"{'above' if self.above else 'at least'} {self.low}{self.bottom}")
        if self.high is not None:
            parts.append(f"at most {self.high}")
        return " and ".join(parts) or "any number"

    @property
    def keywords(self) -> dict[str, float]:
        """The same in JSON Schema's words."""
        found: dict[str, float] = {}
        if self.low is not None:
            found["exclusiveMinimum" if self.above else "minimum"] = self.low
        if self.high is not None:
            found["maximum"] = self.high
        return found


RANGES: Mapping[str, Range] = {
    "temperature": Range(low=0, high=2, default=1.0),
    "top_p": Range(low=0, high=1, above=True, default=1.0),
    "top_k": Range(low=-1, default=0, bottom=" (-1 and 0: off)"),
    "min_p": Range(low=0, high=1, default=0.0),
    "presence_penalty": Range(low=-2, high=2, default=0.0),
    "frequency_penalty": Range(low=-2, high=2, default=0.0),
    "repetition_penalty": Range(low=0, high=10, above=True, default=1.0),
    "seed": Range(low=-(2**63), high=2**63 - 1),
    "n": Range(low=1, default=1),
    "min_tokens": Range(low=0, default=0),
    "priority": Range(low=-1000, high=1000, default=0),
    "logprobs": Range(low=0),
    "prompt_logprobs": Range(low=0),
    "top_logprobs": Range(low=0, default=0),
    "best_of": Range(low=1),
    "max_tokens": Range(low=1),
    "max_completion_tokens": Range(low=1),
}


def with_range(schema: dict[str, Any], numbers: Range) -> dict[str, Any]:
    """A property's JSON Schema with the range in each branch that is a number."""
    if schema.get("type") in ("number", "integer"):
        return {**schema, **numbers.keywords}
    branches = schema.get("anyOf")
    if branches is None:
        return schema
    return {**schema, "anyOf": [with_range(branch, numbers) for branch in branches]}
