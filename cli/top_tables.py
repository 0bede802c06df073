"""What `tandem top` shows, made of what the admin servers say: rows of text, without a screen."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from cli.operator_client import Snapshot
from cli.waterfall import seconds

Row = tuple[str | Text, ...]
STATES = {
    "owned": "blue",
    "in_transfer": "yellow",
    "cached": "green",
    "quarantined": "red",
    "free": "bright_black",
}
_BAR_COLUMNS = 24
MODELS = ("model", "", "prefill", "decode", "queue", "placed now", "disaggregated", "local")
WORKERS = (
    *("worker", "model", "KV blocks", "used", "run", "wait", "preempted", "to read", "step"),
    "",
)
GATEWAYS = ("gateway", "model", "TTFT p50", "p95", "ITL p50", "p95", "tokens/s", "in flight")
TRANSFERS = ("transfers", "transport", "peers", "sent", "GB/s now", "GB/s while sending")
_SENT, _BUSY = "_bytes_sent", "_busy_us"


def summary(snapshot: Snapshot) -> str:
    """The queue and the placements in a line."""
    cluster = snapshot.cluster
    leader = cluster.get("leader", {})
    if not leader.get("leads", True):
        return f"this scheduler stands by; {leader['leader'] or 'nobody'} leads"
    placed = ", ".join(f"{count:,} {kind}" for kind, count in cluster["placements"].items())
    return f"queue {cluster['num_queued']}   placed now {cluster['num_placed']}   so far {placed}"


def models(snapshot: Snapshot) -> Iterator[Row]:
    """Whether each model is served, by how many workers, and what waits for it."""
    for told in snapshot.cluster["models"]:
        placements = told["placements"]
        yield (
            told["model"],
            Text("ready", "green") if told["ready"] else Text(told["reason"], "red"),
            str(told["prefill"]),
            str(told["decode"]),
            str(told["num_queued"]),
            str(told["num_placed"]),
            *(f"{placements.get(kind, 0):,}" for kind in ("disaggregated", "local")),
        )


def workers(snapshot: Snapshot) -> Iterator[Row]:
    """By model, prefill workers first."""
    order = {told["model"]: number for number, told in enumerate(snapshot.cluster["models"])}
    for told in sorted(
        snapshot.cluster["workers"],
        key=lambda w: (order[w["model"]], w["role"] != "prefill", w["worker"]),
    ):
        used = told["num_blocks"] - told["blocks"]["free"]
        yield (
            told["worker"].partition("/")[0],
            told["model"],
            kv_bar(told["blocks"], told["num_blocks"]),
            f"{used}/{told['num_blocks']}",
            str(told["num_running"]),
            str(told["num_waiting"]),
            str(told["num_preempted"]),
            f"{told['backlog_tokens']:,}",
            seconds(told["step_s"] or None),
            Text("draining", "red") if told["draining"] else "",
        )


def gateways(snapshot: Snapshot) -> Iterator[Row]:
    """How fast each has been in the last half minute, with each model."""
    fields = ("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s")
    for name, told in snapshot.latencies.items():
        for model, sample in told["models"].items():
            last: Mapping[str, Any] = sample or {}
            yield (
                name,
                model,
                *(seconds(last.get(field)) for field in fields),
                f"{last.get('tokens_per_s', 0.0):,.1f}",
                str(last.get("in_flight", 0)),
            )


@dataclass(frozen=True, slots=True)
class Speedometer:
    """Turns counters of two looks into speeds."""

    before: Mapping[tuple[str, str], int]
    elapsed_s: float

    def rows(self, snapshot: Snapshot) -> Iterator[Row]:
        """What each worker has sent by each transport that it used."""
        for told in snapshot.cluster["workers"]:
            name, counters = told["worker"], told["counters"]
            for transport in _transports(counters):
                sent, busy_us = counters[transport + _SENT], counters.get(transport + _BUSY, 0)
                gained = sent - self.before.get((name, transport), sent)
                now = gained / self.elapsed_s / 1e9 if self.elapsed_s > 0 else 0.0
                yield (
                    name.partition("/")[0],
                    transport,
                    str(counters.get(transport + "_pairings", 0)),
                    f"{sent / 1e6:,.1f} MB",
                    f"{now:.3f}",
                    f"{sent / busy_us / 1e3:.2f}" if busy_us else "-",
                )


def sent_bytes(snapshot: Snapshot) -> dict[tuple[str, str], int]:
    """By worker and transport: what the next look is compared with."""
    return {
        (told["worker"], transport): told["counters"][transport + _SENT]
        for told in snapshot.cluster["workers"]
        for transport in _transports(told["counters"])
    }


def curve(snapshot: Snapshot, field: str) -> list[float]:
    """A percentile over the last minutes, of the gateway that has most to say; 0 where nothing."""
    samples: list[dict[str, float | None]] = max(
        (told["samples"] for told in snapshot.latencies.values()), key=len, default=[]
    )
    return [sample[field] or 0.0 for sample in samples]


def kv_bar(blocks: Mapping[str, int], num_blocks: int, columns: int = _BAR_COLUMNS) -> Text:
    """A pool by state. What there is of a state can always be seen."""
    bar = Text()
    for state, colour in STATES.items():
        if state != "free" and (count := blocks.get(state, 0)):
            bar.append("█" * max(1, round(columns * count / max(1, num_blocks))), colour)
    bar.truncate(columns)
    bar.append("░" * (columns - len(bar)), STATES["free"])
    return bar


def _transports(counters: Mapping[str, int]) -> list[str]:
    return [
        name.removesuffix(_SENT)
        for name, count in counters.items()
        if name.endswith(_SENT) and count
    ]
