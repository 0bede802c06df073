"""What `tandem simulate` was told: checked, and made into a load and a cluster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.sim.agenda import Agenda
from bench.sim.colocated import Colocated
from bench.sim.event_log import EventLog
from bench.sim.figures import Figures, SimSlo, figures
from bench.sim.possible import check_possible
from bench.sim.profile import DEFAULT_PROFILE, load_timing
from bench.sim.request import Outcome, SimRequest
from bench.sim.shape import ClusterShape
from bench.sim.static_split import StaticSplit
from bench.sim.system import System, run
from bench.sim.tandem import Death, Tandem, scheduler_config
from bench.sim.timing import Timing
from bench.sim.trace import TraceRow, read_trace
from bench.sim.workload import Arrivals, check_arrivals, draw, replay
from core.errors import ConfigError, InvalidRequest

DEFAULT_RATE = 8.0
DEFAULT_REQUESTS = 1500
_DEFAULT_LENGTHS = (512, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`trace` None: all requests have `lengths`, (prompt, answer). `rate` None with a trace: its
    own times, `speed` times as fast."""

    shape: ClusterShape
    system: Literal["tandem", "split", "colocated"] = "tandem"
    chunk: int = 512
    profile: str = DEFAULT_PROFILE
    trace: str | None = None
    data: Path | None = None
    lengths: tuple[int, int] = _DEFAULT_LENGTHS
    rate: float | None = None
    speed: float = 1.0
    num_requests: int = DEFAULT_REQUESTS
    variation: float = 1.0
    seed: int = 1
    slo: SimSlo = field(default_factory=SimSlo)
    deaths: Sequence[Death] = ()

    def timing(self) -> Timing:
        """Of the profile. Raises ConfigError."""
        timing = load_timing(self.profile)
        self.shape.checked(timing)
        return timing

    def rows(self, timing: Timing) -> list[TraceRow]:
        """The lengths to draw from. Raises InvalidRequest where one fits no worker."""
        if self.trace is None:
            prompt, answer = self.lengths
            if prompt < 1 or answer < 1:
                raise InvalidRequest(
                    f"--input-len {prompt} and --output-len {answer}: at least 1 token each",
                    field="input_len",
                )
            rows = [TraceRow(prompt, answer)]
        else:
            rows = read_trace(self.trace, self.data)
        for row in rows:
            tokens = row.prompt_tokens + row.output_tokens
            if tokens > timing.kv_tokens:
                where = (
                    "--input-len and --output-len"
                    if row.line is None
                    else f"{self.trace}: row {row.line}, prompt and answer columns"
                )
                raise InvalidRequest(
                    f"{where}: {tokens} tokens of prompt and answer: a worker of "
                    f"{timing.name} holds KV for {timing.kv_tokens}",
                    field="trace",
                )
        return rows

    def requests(self, rows: Sequence[TraceRow]) -> list[SimRequest]:
        """In the order of their arrival. Raises InvalidRequest."""
        size, prefixes = self.shape.block_size, self.shape.prefix_cache
        if self.rate is None and self.trace is not None:
            if not (self.speed > 0 and math.isfinite(self.speed)):
                raise InvalidRequest(f"--speed must be positive, not {self.speed:g}", field="speed")
            return replay(rows, speed=self.speed, block_size=size, prefixes=prefixes)
        arrivals = Arrivals(
            rate=self.rate if self.rate is not None else DEFAULT_RATE,
            num_requests=self.num_requests,
            variation=self.variation,
            seed=self.seed,
        )
        check_arrivals(arrivals)
        return draw(rows, arrivals, block_size=size, prefixes=prefixes)

    def make(self, timing: Timing, agenda: Agenda, log: EventLog | None = None) -> System:
        """The cluster."""
        shape = self.shape
        if self.system != "tandem" and self.deaths:
            raise InvalidRequest("only a system of tandem survives deaths", field="kill")
        if self.system == "split":
            if shape.prefill_workers < 1:
                raise ConfigError("a split needs a prefill worker")
            return StaticSplit(
                shape.prefill_workers,
                shape.decode_workers,
                timing,
                agenda,
                block_size=shape.block_size,
            )
        if self.system == "colocated":
            workers = shape.prefill_workers + shape.decode_workers
            return Colocated(workers, self.chunk, timing, agenda, block_size=shape.block_size)
        if shape.elastic == "auto" and self.deaths:
            raise InvalidRequest(
                "workers that turn do not die here: not with --elastic", field="kill"
            )
        names = {f"prefill-{i}" for i in range(shape.prefill_workers)}
        names |= {f"decode-{i}" for i in range(shape.decode_workers)}
        for death in self.deaths:
            if death.worker not in names:
                raise InvalidRequest(
                    f"no worker {death.worker}: one of {', '.join(sorted(names))}", field="kill"
                )
        return Tandem(shape, timing, agenda, deaths=self.deaths, log=log)


def simulate(scenario: Scenario, log: EventLog | None = None) -> tuple[Figures, Sequence[Outcome]]:
    """One run. Raises TandemError for what cannot be run."""
    timing = scenario.timing()
    scenario.slo.checked()
    rows = scenario.rows(timing)
    check_possible(scenario.slo, rows, timing, prefix_cache=scenario.shape.prefix_cache)
    requests = scenario.requests(rows)
    agenda = Agenda()
    done = run(scenario.make(timing, agenda, log), agenda, requests)
    return figures(done, scenario.slo), done.outcomes


def new_log(scenario: Scenario) -> EventLog:
    """An empty log for this scenario's scheduler."""
    if scenario.system != "tandem":
        raise InvalidRequest("--record needs a scheduler: --system tandem", field="record")
    if scenario.shape.elastic == "auto":
        raise InvalidRequest(
            "--record keeps decisions of workers that do not turn: not with --elastic",
            field="record",
        )
    return EventLog(scheduler_config(scenario.shape))


def parse_death(text: str) -> Death:
    """Of WORKER@SECONDS or WORKER@SECONDS+BACK. Raises InvalidRequest."""
    worker, _, when = text.partition("@")
    at_text, plus, back_text = when.partition("+")
    try:
        at_s = float(at_text)
        back_s = float(back_text) if plus else None
    except ValueError:
        at_s, back_s = -1.0, None
    if not worker or not 0 <= at_s < math.inf or (back_s is not None and not 0 < back_s < math.inf):
        raise InvalidRequest(f"--kill {text} is not WORKER@SECONDS[+SECONDS]", field="kill")
    return Death(worker=worker, at_s=at_s, back_after_s=back_s)
