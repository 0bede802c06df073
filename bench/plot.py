"""Latencies as a picture: how they are distributed, and how the gaps went over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.load.request import Record
from core.errors import ConfigError, InvalidRequest

_POINT = 3.0


def check_plot(path: Path) -> None:
    """Raises ConfigError without matplotlib, InvalidRequest for a name that is none of a PNG.

    To be asked before a long run, not after it.
    """
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'tandem-llm[bench]'") from error
    if path.suffix.lower() != ".png":
        raise InvalidRequest(f"--plot {path}: a picture's name ends in .png", field="plot")


def plot(cases: Mapping[str, Mapping[str, Sequence[Record]]], path: Path) -> None:
    """A row for each case, whose arms are its colours: TTFT and ITL as CDFs, ITL over time.

    Raises InvalidRequest where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4 * len(cases)), layout="constrained")
    axes = figure.subplots(len(cases), 3, squeeze=False)
    for (name, arms), (ttft, itl, over_time) in zip(cases.items(), axes, strict=True):
        for arm, records in arms.items():
            done = [record for record in records if record.ok]
            _cdf(ttft, [1e3 * record.ttft_s for record in done], arm)
            _cdf(itl, [1e3 * gap for record in done for gap in record.itls_s], arm)
            ends_s = [time_s for record in done for time_s in record.token_times_s[1:]]
            gaps_ms = [1e3 * gap for record in done for gap in record.itls_s]
            over_time.scatter(ends_s, gaps_ms, s=_POINT, label=arm, alpha=0.6)
        for axis, title in ((ttft, "TTFT"), (itl, "ITL")):
            axis.set(title=f"{title}: {name}", xlabel="ms", ylabel="share of all", ylim=(0, 1))
        over_time.set(title=f"ITL over time: {name}", xlabel="s", ylabel="ms")
        # Between a step and a stall behind somebody's prompt lie two orders of magnitude.
        itl.set_xscale("log")
        over_time.set_yscale("log")
        for axis in (ttft, itl, over_time):
            axis.grid(alpha=0.3)
            axis.legend()
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", field="plot") from error


def _cdf(axis: Any, values: list[float], label: str) -> None:
    ordered = sorted(values)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    axis.step(ordered, shares, where="post", label=label)
