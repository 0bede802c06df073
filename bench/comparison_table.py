"""A comparison's figures for a terminal."""

from collections.abc import Mapping
from typing import Any

from bench.load.table import grid, number

_COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "req/s",
    "goodput_requests_per_s": "goodput/s",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p99": "TTFT p99",
    "itl_ms_p50": "ITL p50",
    "itl_ms_p99": "ITL p99",
    "tpot_ms_p50": "TPOT p50",
    "e2e_ms_p50": "E2E p50",
    "pss_mib": "MiB",
}


def comparison(cases: Mapping[str, Any], baseline: str) -> str:
    """For each case the arms' medians over rounds, in ms where nothing is said, and the ratios."""
    return "\n\n".join(
        f"{name}\n{_medians(case)}{_ratios(case, baseline)}" for name, case in cases.items()
    )


def _medians(case: Mapping[str, Any]) -> str:
    shown = [
        name
        for name in _COLUMNS
        if any(arm["median"][name] is not None for arm in case["arms"].values())
    ]
    rows = [["", *(_COLUMNS[name] for name in shown), "errors"]]
    for name, arm in case["arms"].items():
        errors = sum(arm["errors"].values())
        cells = [number(arm["median"][column]) for column in shown]
        rows.append([name, *cells, str(errors)])
    return grid(rows)


def _ratios(case: Mapping[str, Any], baseline: str) -> str:
    lines = ""
    for name, found in case["ratios"].items():
        rows = [[f"{name} / {baseline}", "median", "each round"]]
        for column in _COLUMNS:
            if column in found:
                each = " ".join(f"{ratio:.2f}" for ratio in found[column]["rounds"])
                rows.append([f"  {_COLUMNS[column]}", f"{found[column]['median']:.2f}", each])
        lines += f"\n{grid(rows)}"
    return lines
