"""What no cluster can promise: an SLO below what one worker needs for a request, alone and idle."""

from collections.abc import Sequence

from bench.sim.figures import SimSlo
from bench.sim.timing import Timing
from bench.sim.trace import TraceRow
from core.errors import InvalidRequest


def check_possible(
    slo: SimSlo, rows: Sequence[TraceRow], timing: Timing, *, prefix_cache: bool = False
) -> None:
    """Raises InvalidRequest, with the bound and the row that comes nearest, where none can keep it.

    A prompt's one step bounds TTFT, its last token's alone where a prefix cache may have the rest;
    a decode step of one sequence bounds gaps. Answers of a single token have no gaps.
    """
    shortest = min(rows, key=lambda row: row.prompt_tokens)
    tokens = 1 if prefix_cache else shortest.prompt_tokens
    _check("--slo-ttft-ms", slo.ttft_ms, timing.prefill_s(tokens), "the first token", shortest)
    if any(row.output_tokens == 1 for row in rows):
        return
    gap_s = timing.decode_s(1, shortest.prompt_tokens + 1)
    for flag, bound_ms in (("--slo-tbt10-ms", slo.tbt10_ms), ("--slo-tpot-ms", slo.tpot_ms)):
        _check(flag, bound_ms, gap_s, "each further token", shortest)


def _check(flag: str, bound_ms: float | None, least_s: float, what: str, row: TraceRow) -> None:
    if bound_ms is None or bound_ms >= 1e3 * least_s:
        return
    where = f"row {row.line}, " if row.line is not None else ""
    raise InvalidRequest(
        f"{flag} {bound_ms:g}: {what} of the shortest prompt ({where}{row.prompt_tokens} tokens) "
        f"takes {1e3 * least_s:.3g} ms on an idle worker: no cluster keeps to that",
        field="slo",
    )
