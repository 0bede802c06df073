"""The five workloads of the four H100s comparison, and what was published of each.

The published figures are of another simulator with the same timing model and the same rules
(docs/simulation.md); ours are held to them within a tenth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.sim.figures import SimSlo
from bench.sim.trace import TraceRow, read_trace

# Chunk sizes among which the best is looked for.
CHUNKS = (256, 512, 768, 1024, 2048, 8192)
SPLITS = ((1, 3), (2, 2), (3, 1))
_LONGEST_MOONCAKE = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload and its SLO. `published`: requests per second of each split, and colocated."""

    name: str
    trace: str
    slo: SimSlo
    num_requests: int
    published: Mapping[str, float]
    published_chunk: int

    def lengths(self, data: Path | None) -> list[TraceRow]:
        """The trace's rows, without prompts that are too long for one GPU's fair share."""
        rows = read_trace(self.trace, data)
        if self.trace.startswith("mooncake"):
            rows = [row for row in rows if row.prompt_tokens < _LONGEST_MOONCAKE]
        return rows


def _row(
    name: str,
    trace: str,
    slo: SimSlo,
    published: tuple[float, float, float, float],
    chunk: int,
    num_requests: int = 1500,
) -> Row:
    names = ("1P3D", "2P2D", "3P1D", "colocated")
    return Row(
        name=name,
        trace=trace,
        slo=slo,
        num_requests=num_requests,
        published=dict(zip(names, published, strict=True)),
        published_chunk=chunk,
    )


ROWS = (
    _row(
        "Azure conv, TTFT 400 ms, TBT10 30 ms",
        "azure-conv",
        SimSlo(ttft_ms=400, tbt10_ms=30),
        (32, 74, 60, 80),
        768,
    ),
    _row(
        "Azure conv, TTFT 300 ms, TBT10 20 ms",
        "azure-conv",
        SimSlo(ttft_ms=300, tbt10_ms=20),
        (31, 71, 47, 66),
        512,
    ),
    _row(
        "Azure conv, TTFT 400 ms, TPOT 50 ms",
        "azure-conv",
        SimSlo(ttft_ms=400, tpot_ms=50),
        (32, 73, 62, 95),
        8192,
    ),
    _row(
        "Azure code, TTFT 400 ms, TBT10 30 ms",
        "azure-code",
        SimSlo(ttft_ms=400, tbt10_ms=30),
        (15, 39, 63, 54),
        768,
    ),
    _row(
        "Mooncake conversation, TTFT 3 s, TBT10 30 ms",
        "mooncake-conversation",
        SimSlo(ttft_ms=3000, tbt10_ms=30),
        (2.5, 6.1, 3.6, 4.6),
        256,
        num_requests=700,
    ),
)
