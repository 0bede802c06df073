"""One load, described and checked before anything is sent."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Self

from bench.load.drive import poisson_arrivals
from bench.load.request import LoadRequest
from bench.load.summary import Slo
from bench.load.workloads import WORKLOADS, Seeds, Shape, input_len, output_len
from core.errors import InvalidRequest

DEFAULT_CONCURRENCY = 8
_MAX_REQUESTS = 1_000_000
# Which settings of a shape a workload heeds. Others are refused rather than ignored.
_HEEDS = {
    "random": {"input_len", "output_len", "token_ids"},
    "chat": {"output_len", "data"},
    "shared-prefix": {"output_len", "data"},
    "poisson": {"trace", "length_scale", "data", "token_ids"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a comparison a load stands. `arm` tells apart what must not share a prompt."""

    seed: int = 0
    case: str = ""
    round: int = 0
    arm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send, and when: at `rate` per second, or with `concurrency` requests running."""

    workload: str = "random"
    num_requests: int = 32
    concurrency: int | None = None
    rate: float | None = None
    num_warmup: int = 1
    shape: Shape = field(default_factory=Shape)
    slo: Slo = field(default_factory=Slo)
    ignore_eos: bool = True
    timeout_s: float = 600.0

    def checked(self) -> Self:
        """Itself, with a concurrency where nothing was said. Raises InvalidRequest."""
        if self.workload not in WORKLOADS:
            raise InvalidRequest(
                f"no workload {self.workload}: one of {', '.join(WORKLOADS)}", field="workload"
            )
        self._check_numbers()
        self._check_heeded()
        if self.rate is not None and self.concurrency is not None:
            raise InvalidRequest("either --rate or --concurrency, not both", field="rate")
        if self.rate is None and self.workload == "poisson":
            raise InvalidRequest("poisson needs --rate, requests per second", field="rate")
        if self.rate is None and self.concurrency is None:
            return replace(self, concurrency=DEFAULT_CONCURRENCY)
        return self

    def fitted(self, window: int | None) -> Self:
        """For a model with this window. Raises InvalidRequest where nothing can fit it."""
        if window is not None and self.workload == "random":
            asked = input_len(self.shape) + output_len(self.shape)
            if asked > window:
                raise InvalidRequest(
                    f"--input-len {input_len(self.shape)} and --output-len "
                    f"{output_len(self.shape)} are {asked} tokens: the window has {window}",
                    field="input_len",
                )
        return replace(self, shape=replace(self.shape, window=window))

    def measured(self, place: Place) -> list[LoadRequest]:
        """The requests that count."""
        return self._make(place, "measured", self.num_requests)

    def warm_up(self, place: Place) -> list[LoadRequest]:
        """Requests of the same kind that are sent before, and are none of those that count."""
        return self._make(place, "warm-up", self.num_warmup)

    def arrivals_s(self, place: Place) -> list[float]:
        """When each measured request is to be sent: the same for every arm of a round."""
        assert self.rate is not None
        chance = random.Random(f"{_common(place)}/arrivals")
        return poisson_arrivals([chance.random() for _ in range(self.num_requests - 1)], self.rate)

    def _make(self, place: Place, part: str, count: int) -> list[LoadRequest]:
        own = f"{_common(place)}/{place.arm}"
        seeds = Seeds(lengths=f"{_common(place)}/{part}", texts=f"{own}/{part}", shared=own)
        return WORKLOADS[self.workload](self.shape, count, seeds)

    def _check_numbers(self) -> None:
        shape = self.shape
        _within("--requests", self.num_requests, 1, _MAX_REQUESTS)
        _within("--warmup", self.num_warmup, 0, _MAX_REQUESTS)
        _within("--concurrency", self.concurrency, 1, 4096)
        _within("--input-len", shape.input_len, 1, 10_000_000)
        _within("--output-len", shape.output_len, 1, 10_000_000)
        for name, value in (
            ("--rate", self.rate),
            ("--timeout", self.timeout_s),
            ("--length-scale", shape.length_scale),
            ("--slo-ttft-ms", self.slo.ttft_ms),
            ("--slo-tpot-ms", self.slo.tpot_ms),
        ):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InvalidRequest(f"{name} must be positive, not {value:g}", field=name)
        low, high = shape.token_ids
        if not 0 <= low < high:
            raise InvalidRequest(
                f"--token-ids {low}:{high} has no token ids: LOW:HIGH, the second not included",
                field="token_ids",
            )

    def _check_heeded(self) -> None:
        neutral = Shape()
        for name in ("input_len", "output_len", "trace", "length_scale", "data", "token_ids"):
            given = getattr(self.shape, name) != getattr(neutral, name)
            if given and name not in _HEEDS[self.workload]:
                flag = "--" + name.replace("_", "-")
                raise InvalidRequest(
                    f"{flag} means nothing to the workload {self.workload}", field=name
                )


def parse_token_ids(text: str) -> tuple[int, int]:
    """Of LOW:HIGH. Raises InvalidRequest."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise InvalidRequest(f"--token-ids {text} is not LOW:HIGH", field="token_ids")
    return int(low), int(high)


def _common(place: Place) -> str:
    return f"{place.seed}/{place.case}/{place.round}"


def _within(flag: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{flag} must be {low} to {high}, not {value}", field=flag)
