"""A run as a picture: first tokens and gaps as CDFs, and both over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.sim.figures import SimSlo, counted
from bench.sim.request import Outcome
from core.errors import InvalidRequest

_POINT = 3.0


def plot(outcomes: Sequence[Outcome], slo: SimSlo, title: str, path: Path) -> None:
    """Draws the answered requests. `bench.plot.check_plot` says beforehand whether it can.

    Raises InvalidRequest where the file cannot be written.
    """
    from matplotlib.figure import Figure

    done = [outcome for outcome in counted(outcomes) if outcome.ok]
    figure = Figure(figsize=(15, 4), layout="constrained")
    figure.suptitle(title)
    ttft, gaps, over_time = figure.subplots(1, 3)
    ttft_ms = [1e3 * outcome.ttft_s for outcome in done]
    _cdf(ttft, ttft_ms, "TTFT", slo.ttft_ms)
    answers = [outcome for outcome in done if outcome.num_tokens > 1]
    _cdf(gaps, [1e3 * outcome.tbt10_s for outcome in answers], "TBT10", slo.tbt10_ms)
    _cdf(gaps, [1e3 * outcome.tpot_s for outcome in answers], "TPOT", slo.tpot_ms)
    over_time.scatter([o.request.arrival_s for o in done], ttft_ms, s=_POINT)
    over_time.set(title="TTFT over time", xlabel="arrival, s", ylabel="ms", yscale="log")
    for axis, name in ((ttft, "time to first token"), (gaps, "gaps of an answer")):
        axis.set(title=name, xlabel="ms", ylabel="share of all", ylim=(0, 1))
        axis.legend()
    for axis in (ttft, gaps, over_time):
        axis.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", field="plot") from error


def _cdf(axis: Any, values: list[float], label: str, bound: float | None) -> None:
    ordered = sorted(values)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    (line,) = axis.step(ordered, shares, where="post", label=label)
    if bound is not None:
        axis.axvline(bound, color=line.get_color(), linestyle="--", label=f"{label} SLO")
