"""Figures for a terminal."""

from collections.abc import Sequence

from bench.load.measure import Measurement
from bench.load.summary import Distribution, Summary


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three or more digits that count; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def one_load(measurement: Measurement) -> str:
    """A load's figures, one above the other."""
    summary = measurement.summary
    head = [
        ["requests", f"{summary.completed} of {summary.requests} completed"],
        ["duration", f"{summary.duration_s:.2f} s"],
        ["output", f"{summary.output_tokens} tokens, {number(summary.output_tokens_per_s)} per s"],
        ["requests per s", number(summary.requests_per_s)],
        ["prompts", _prompts(summary)],
        ["client", _client(measurement)],
    ]
    if summary.goodput_requests_per_s is not None:
        goodput = f"{number(summary.goodput_requests_per_s)} requests per s within the SLO"
        head.insert(4, ["goodput", goodput])
    head += [["error", f"{kind}: {count}"] for kind, count in summary.errors.items()]
    head += [["", reason] for reason in reasons(measurement)]
    if summary.short_answers:
        head.append(["short answers", f"{summary.short_answers}: fewer tokens than asked for"])
    name = max(len(row[0]) for row in head)
    text = "\n".join(f"{left.ljust(name)}  {right}" for left, right in head)
    return f"{text}\n\n{grid(_latencies(summary))}"


def reasons(measurement: Measurement) -> list[str]:
    """What was said about the errors, once each, no more than three."""
    said = [record.failure.detail for record in measurement.records if record.failure is not None]
    return list(dict.fromkeys(said))[:3]


def _prompts(summary: Summary) -> str:
    if summary.cached_tokens is None:
        return f"{summary.prompt_tokens} tokens"
    share = 100 * summary.cached_tokens / max(1, summary.prompt_tokens)
    return f"{summary.prompt_tokens} tokens, {share:.0f}% of them cached"


def _client(measurement: Measurement) -> str:
    late_ms = measurement.summary.max_late_ms
    return f"{100 * measurement.client_cpu_share:.1f}% of a core, {late_ms:.1f} ms late at most"


def _latencies(summary: Summary) -> list[list[str]]:
    rows = [["ms", "mean", "p50", "p90", "p99", "max"]]
    for name, found in (
        ("TTFT", summary.ttft_ms),
        ("ITL", summary.itl_ms),
        ("TPOT", summary.tpot_ms),
        ("E2E", summary.e2e_ms),
    ):
        rows.append([name, *_row(found)])
    return rows


def _row(found: Distribution | None) -> list[str]:
    if found is None:
        return ["-"] * 5
    return [number(value) for value in (found.mean, found.p50, found.p90, found.p99, found.max)]
