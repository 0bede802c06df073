"""The words in which a dashboard is described."""

from dataclasses import dataclass

# Grafana's names of units.
SECONDS, SHARE, BYTES, COUNT = "s", "percentunit", "bytes", "short"
PER_SECOND, BYTES_PER_SECOND, REQUESTS_PER_SECOND = "ops", "Bps", "reqps"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` may name labels, such as `{{stage}}`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart over time. `help` says how to read it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Charts under one heading, two abreast."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard. With `by_process` it lets one choose among the workers as `$process`."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    by_process: bool = False


def rate(series: str, by: str = "") -> str:
    """The summed rate of a counter, by these labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({series}[$__rate_interval]))"


def quantiles(histogram: str, selector: str = "", by: str = "") -> tuple[Query, ...]:
    """The median, the 90th and the 99th percentile of a histogram, also by these labels."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    buckets = rate(f"{histogram}_bucket{selector}", labels)
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}{legend}")
        for share in (0.5, 0.9, 0.99)
    )


def mean(histogram: str, by: str) -> str:
    """The mean of a histogram, by these labels."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"
