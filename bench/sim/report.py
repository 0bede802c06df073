"""Figures as text."""

from collections.abc import Sequence

from bench.load.summary import Distribution
from bench.sim.comparison import Compared, geometric_mean
from bench.sim.figures import Figures, SimSlo
from bench.sim.switching import PHASE_S, Switched


def one_run(figures: Figures, slo: SimSlo) -> str:
    """A run's figures, for people."""
    lines = [
        f"{figures.completed} of {figures.requests} requests answered, "
        f"{figures.requests_per_s:.3g}/s, {figures.output_tokens_per_s:.4g} tokens/s",
    ]
    if slo:
        lines.append(
            f"goodput {figures.goodput_requests_per_s:.3g}/s: {figures.good_share:.1%} keep to "
            + ", ".join(_bounds(slo))
        )
    lines.append(f"{'ms':8}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name, values in (
        ("TTFT", figures.ttft_ms),
        ("TBT10", figures.tbt10_ms),
        ("TPOT", figures.tpot_ms),
        ("E2E", figures.e2e_ms),
    ):
        lines.append(f"{name:8}{_percentiles(values)}")
    lines.append(
        f"read by decode workers {figures.read_locally:.0%}, from caches "
        f"{figures.cached_share:.0%}, preempted {figures.preemptions}"
    )
    lines += [
        f"{worker:12} busy {share:4.0%}, KV at most {figures.kv_share[worker]:4.0%}"
        for worker, share in figures.busy_share.items()
    ]
    lines += [f"{count} failed: {code}" for code, count in figures.errors.items()]
    return "\n".join(lines)


def table(rows: Sequence[Compared]) -> str:
    """A comparison, in requests per second, as Markdown. In brackets: published."""
    lines = [
        "| workload, SLO | 1P3D | 2P2D | 3P1D | colocated (chunk) | ours | to the best | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{row.goodput[name]:.3g} ({row.row.published[name]:g})"
            for name in ("1P3D", "2P2D", "3P1D")
        ]
        cells.append(
            f"{row.goodput['colocated']:.3g} at {row.chunk} "
            f"({row.row.published['colocated']:g} at {row.row.published_chunk})"
        )
        cells += [f"{row.ours:.3g}", f"{row.ratio:.2f}", f"{row.bound:.3g}"]
        lines.append(f"| {row.row.name} | {' | '.join(cells)} |")
    mean = geometric_mean([row.ratio for row in rows])
    least = min(row.ratio for row in rows)
    lines.append("")
    lines.append(f"ours to the best other: geometric mean {mean:.3f}, least {least:.3f}")
    return "\n".join(lines)


def switching_table(switched: Switched) -> str:
    """The load that changes: each choice's highest share of the bound, as Markdown."""
    names = sorted(switched.static, key=lambda name: name != switched.best)
    cells = [
        f"{switched.static[name]:.3f}"
        if name == switched.best
        else f"< {switched.static[name]:.3f}"
        for name in names
    ]
    rates = ", ".join(f"{rate:.3g}" for rate in switched.rates)
    return "\n".join(
        [
            "",
            f"a load that changes every {PHASE_S:g} s; shares of each part's bound: {rates}",
            "",
            f"| {' | '.join(names)} | ours | to the best |",
            "|---" * (len(names) + 2) + "|",
            f"| {' | '.join(cells)} | {switched.ours:.3f} | {switched.ratio:.2f} |",
            "",
            f"{switched.num_turns} workers turned",
        ]
    )


def _bounds(slo: SimSlo) -> list[str]:
    bounds = (("TTFT", slo.ttft_ms), ("TBT10", slo.tbt10_ms), ("TPOT", slo.tpot_ms))
    return [f"{name} {bound:g} ms" for name, bound in bounds if bound is not None]


def _percentiles(values: Distribution | None) -> str:
    if values is None:
        return f"{'-':>10}"
    told = (values.p50, values.p90, values.p99, values.max)
    return "".join(f"{value:>10.4g}" for value in told)
