"""`make simulate-4xh100`: four H100s, run in every way, over five real workloads."""

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path

import structlog

from bench.sim.comparison import NUM_GPUS, OURS, Compared, compare, geometric_mean
from bench.sim.profile import DEFAULT_PROFILE, load_timing
from bench.sim.report import switching_table, table
from bench.sim.rows import ROWS
from bench.sim.search import described
from bench.sim.switching import Switched, compare_switching, phases
from core.errors import TandemError


def main() -> int:
    """Prints the table, and one line of JSON last."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of the public traces")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="what steps take")
    parser.add_argument("--rows", help="only rows whose names contain this; no switching load")
    parser.add_argument("--switching", action="store_true", help="the switching load alone")
    asked = parser.parse_args()
    # The scheduler's log is one of real workers.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = [row for row in ROWS if (asked.rows or "") in row.name]
    if asked.switching:
        rows = []
    elif not rows:
        print(f"no row's name contains {asked.rows}", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    compared: list[Compared] = []
    switched: Switched | None = None
    try:
        timing = load_timing(asked.profile)
        lengths = {row.trace: row.lengths(asked.data) for row in rows}
        for row in rows:
            compared.append(compare(row, lengths[row.trace], timing, OURS))
            print(f"{row.name}: done", file=sys.stderr)
        if asked.rows is None:
            conversations, code = (row.lengths(asked.data) for row in (ROWS[0], ROWS[3]))
            switched = compare_switching(
                phases(conversations, code, timing, NUM_GPUS), timing, OURS, NUM_GPUS
            )
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return 2
    print(f"{NUM_GPUS} workers, {timing.name}; requests per second, in brackets as published")
    ours = described(OURS, target="nine tenths of the SLO's gap")
    print(f"ours: {ours}\n")
    if compared:
        print(table(compared))
    if switched is not None:
        print(switching_table(switched))
    print(json.dumps(_document(compared, switched, took_s=time.monotonic() - began_s)))
    return 0


def _document(
    rows: list[Compared], switched: Switched | None, *, took_s: float
) -> dict[str, object]:
    document: dict[str, object] = {"took_s": took_s}
    if rows:
        document |= _rows(rows)
    if switched is not None:
        document["switching"] = {**asdict(switched), "ratio": switched.ratio}
    return document


def _rows(rows: list[Compared]) -> dict[str, object]:
    return {
        "rows": [
            {
                "name": each.row.name,
                "goodput": {**each.goodput, "ours": each.ours},
                "chunk": each.chunk,
                "published": each.row.published,
                "off_published": {name: each.error(name) for name in each.goodput},
                "ratio": each.ratio,
                "bound": each.bound,
            }
            for each in rows
        ],
        "geometric_mean_ratio": geometric_mean([each.ratio for each in rows]),
        "least_ratio": min(each.ratio for each in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
