"""Recent requests on a terminal: a list of them, or the stages of one as bars."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = {"gateway": "white", "scheduler": "magenta", "prefill": "yellow", "decode": "blue"}
_FAILED = "red"
# Of an id in a list: enough to find the request by.
_ID_CHARS = 24
# Beside the bars: names, processes, times and what is between them.
_BESIDE_COLUMNS = 52
_LEAST_COLUMNS = 12


def seconds(value: float | None) -> str:
    """As people read them."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def listed(requests: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line for each."""
    if not requests:
        return Text("no request is remembered that matches")
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("when", "id", "outcome", "TTFT", "whole", "prompt", "answer", "workers"):
        right = name in ("TTFT", "whole", "prompt", "answer")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for told in requests:
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(told["began_at"])),
            Text(str(told["job"] or told["request_id"])[:_ID_CHARS]),
            _outcome(told),
            seconds(told["ttft_s"]),
            seconds(told["duration_s"]),
            _count(told["prompt_tokens"]),
            _count(told["completion_tokens"]),
            Text(" ".join(each for each in told["processes"] if "-" in each)),
        )
    return table


def waterfall(told: Mapping[str, Any], width: int) -> RenderableType:
    """One request: what became of it, and its stages in a terminal so many columns wide."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for justify in ("left", "left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    stages = sorted(told["stages"], key=lambda stage: (stage["start_s"], stage["end_s"]))
    whole_s = max([told["duration_s"], *(stage["end_s"] for stage in stages)])
    columns = max(_LEAST_COLUMNS, width - _BESIDE_COLUMNS)
    for stage in stages:
        again = f" #{stage['attempt']}" if stage["attempt"] > 1 else ""
        error = stage["error"]
        colour = _FAILED if error else _COLOURS.get(stage["process"].partition("-")[0], "white")
        table.add_row(
            Text(stage["name"].replace("_", " ") + again),
            Text(stage["process"], "dim"),
            Text(bar(stage["start_s"], stage["end_s"], whole_s, columns), colour),
            seconds(stage["end_s"] - stage["start_s"]),
            Text(error or "", _FAILED),
        )
    return Group(_head(told), table if stages else Text("no stage of it is known", "dim"), "")


def bar(start_s: float, end_s: float, whole_s: float, columns: int) -> str:
    """A stretch of the whole in so many columns, which ends to an eighth of one."""
    if whole_s <= 0:
        return ""
    start = min(int(start_s / whole_s * columns), columns - 1)
    eighths = round((end_s / whole_s * columns - start) * 8)
    eighths = max(1, min(eighths, (columns - start) * 8))
    return " " * start + _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _head(told: Mapping[str, Any]) -> Text:
    head = Text()
    head.append(str(told["job"] or told["request_id"]), "bold")
    head.append("  ").append_text(_outcome(told))
    head.append(
        f"\n{told['operation']} {told['model'] or ''}: {_count(told['prompt_tokens'])} tokens read "
        f"({told['cached_tokens']} cached), {_count(told['completion_tokens'])} made, first one "
        f"after {seconds(told['ttft_s'])}, all in {seconds(told['duration_s'])}"
    )
    ids = [("request", told["request_id"]), ("trace", told["trace_id"]), ("key", told["key"])]
    head.append("\n" + "  ".join(f"{name} {value}" for name, value in ids if value), "dim")
    return head


def _outcome(told: Mapping[str, Any]) -> Text:
    words = ": ".join(each for each in (told["outcome"], told["reason"]) if each)
    return Text(words, "green" if told["outcome"] == "answered" else _FAILED)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
