"""What a simulated request asks for, and what became of it."""

from dataclasses import dataclass, field

import numpy as np

# Of a request's gaps, the share that TBT10 is the mean of: the longest ones.
_TAIL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One request. `prefix` are the hashes of its prompt's full blocks; empty: it shares none."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    prefix: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(slots=True, eq=False)
class Outcome:
    """A request's fate, as its client saw it. Times are those of the simulation.

    `failure` is an error's code; without one, `finished_s` is set at the end.
    """

    request: SimRequest
    first_token_s: float | None = None
    finished_s: float | None = None
    failure: str | None = None
    num_tokens: int = 0
    tpot_s: float = 0.0
    tbt10_s: float = 0.0
    max_gap_s: float = 0.0
    # Who read the prompt, of the last attempt.
    read_by: str = ""
    read_locally: bool = False
    cached_tokens: int = 0
    num_attempts: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    # Token times of earlier attempts, and of the present one.
    _times: list[float] = field(default_factory=list, repr=False)

    @property
    def over(self) -> bool:
        return self.finished_s is not None or self.failure is not None

    @property
    def ok(self) -> bool:
        return self.finished_s is not None and self.failure is None

    @property
    def ttft_s(self) -> float:
        """Only of a request that has a first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.request.arrival_s

    @property
    def e2e_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.request.arrival_s

    def token(self, time_s: float) -> None:
        """One token reaches the client."""
        if self.first_token_s is None:
            self.first_token_s = time_s
        self._times.append(time_s)
        self.num_tokens += 1

    def tokens(self, times_s: list[float], delay_s: float) -> None:
        """Further ones, each that much later than it was made."""
        if delay_s:
            times_s = [time_s + delay_s for time_s in times_s]
        if times_s and self.first_token_s is None:
            self.first_token_s = times_s[0]
        self._times += times_s
        self.num_tokens += len(times_s)

    def finish(self) -> None:
        """The last token is there: works out the gaps, and forgets the single times."""
        times = self._times
        self.finished_s = times[-1]
        if len(times) > 1:
            gaps = np.diff(np.array(times))
            count = max(1, int(_TAIL * len(gaps)))
            gaps.partition(len(gaps) - count)
            self.tbt10_s = float(gaps[-count:].mean())
            self.max_gap_s = float(gaps[-count:].max())
            self.tpot_s = (times[-1] - times[0]) / (len(times) - 1)
        self._times = []

    def fail(self, code: str) -> None:
        """There will be no more of it."""
        self.failure = code
        self._times = []
