"""The efficiencies of a GPU, fitted to measured or published step times.

The grid is a CSV with the columns model, tp, phase (static_ctx: one whole prompt; static_gen: one
decode step), isl (tokens of prompt or of context), batch and latency_ms.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.sim.roofline import Efficiency, Roofline
from core.errors import InvalidRequest

_COLUMNS = ("model", "tp", "phase", "isl", "batch", "latency_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One step: a prompt of `tokens`, or `batch` sequences with a context of `tokens` each."""

    decodes: bool
    tokens: int
    batch: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFit:
    """A profile, and how far it is from the grid on average, as shares."""

    profile: Roofline
    prefill_error: float
    decode_error: float


def read_grid(path: Path, model: str) -> list[GridPoint]:
    """One model's points on one GPU. Raises InvalidRequest that names the row and the column."""
    points = []
    try:
        with path.open(newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InvalidRequest(f"{path}: row 1: no column {missing[0]}", field=missing[0])
            for row in reader:
                if row["model"] == model and row["tp"] == "1":
                    points.append(_point(path, reader.line_num, row))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="grid") from error
    for decodes, least in ((False, 3), (True, 3)):
        if sum(point.decodes is decodes for point in points) < least:
            phase = "static_gen" if decodes else "static_ctx"
            raise InvalidRequest(
                f"{path}: fewer than {least} rows {phase} of {model} with tp 1", field="grid"
            )
    return points


def fit(points: Sequence[GridPoint], profile: Roofline) -> GridFit:
    """The profile with efficiencies that fit the points, errors counted relative to each time."""
    device, model = profile.device, profile.model
    prompts = [point for point in points if not point.decodes]
    base_s, token_s, pair_s = least_squares(
        [(1.0, p.batch * p.tokens, p.batch * p.tokens**2 / 2) for p in prompts],
        [p.seconds for p in prompts],
    )
    steps = [point for point in points if point.decodes]
    step_s, seq_s, context_s = least_squares(
        [(1.0, p.batch, p.batch * p.tokens) for p in steps], [p.seconds for p in steps]
    )
    kept = profile.efficiency
    efficiency = Efficiency(
        linear=_share(2 * model.body_parameters, token_s, device.peak_flops),
        attention=_share(model.pair_flops, pair_s, device.peak_flops),
        kv_read=_share(model.kv_token_bytes, context_s, device.memory_bytes_per_s),
        piece_factor=kept.piece_factor,
        prefill_base_s=base_s,
        decode_base_s=step_s,
        decode_seq_s=seq_s,
    )
    fitted = profile.model_copy(update={"efficiency": efficiency})
    prefill_error, decode_error = errors(points, fitted)
    return GridFit(profile=fitted, prefill_error=prefill_error, decode_error=decode_error)


def errors(points: Sequence[GridPoint], profile: Roofline) -> tuple[float, float]:
    """Of a profile's prefills and decode steps: the mean distance from the points, as a share."""
    timing = profile.timing()
    off: dict[bool, list[float]] = {False: [], True: []}
    for point in points:
        if point.decodes:
            told_s = timing.decode_s(point.batch, point.batch * point.tokens)
        else:
            told_s = timing.prefill_base_s
            told_s += point.batch * timing.prompt_s(0, point.tokens, whole=True)
        off[point.decodes].append(abs(told_s / point.seconds - 1))
    return sum(off[False]) / len(off[False]), sum(off[True]) / len(off[True])


def least_squares(terms: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Coefficients of at least 0, each equation weighted by its time."""
    times = np.array(seconds)
    rows = np.array(terms) / times[:, None]
    scale = np.abs(rows).max(axis=0)
    used = list(range(rows.shape[1]))
    result = np.zeros(rows.shape[1])
    while used:
        solved, *_ = np.linalg.lstsq(rows[:, used] / scale[used], np.ones(len(times)), rcond=None)
        if solved.min() >= 0:
            result[used] = solved / scale[used]
            break
        del used[int(solved.argmin())]
    return [float(each) for each in result]


def _share(work: float, seconds: float, peak: float) -> float:
    """The share of the peak at which so much work takes so long, at most all of it."""
    return min(1.0, work / (seconds * peak)) if seconds > 0 else 1.0


def _point(path: Path, row: int, values: dict[str, str]) -> GridPoint:
    numbers: dict[str, float] = {}
    for column in ("isl", "batch", "latency_ms"):
        try:
            numbers[column] = float(values[column])
        except (TypeError, ValueError):
            numbers[column] = -1.0
        if not 0 < numbers[column] < float("inf"):
            raise InvalidRequest(
                f"{path}: row {row}, column {column}: {values[column]!r} is not positive",
                field=column,
            )
    return GridPoint(
        decodes=values["phase"] == "static_gen",
        tokens=int(numbers["isl"]),
        batch=int(numbers["batch"]),
        seconds=numbers["latency_ms"] / 1e3,
    )
