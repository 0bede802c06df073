"""Workers that read prompts beside their decode steps, in chunks of a fixed size: no split at all.

A request goes to the worker with the fewest; one prompt at a time is read, and a step takes `chunk`
tokens, those of the answers included, but at least 32 of the prompt.
"""

from bench.sim.agenda import Agenda
from bench.sim.request import Outcome
from bench.sim.static_split import ReservingWorker, unbounded_shape
from bench.sim.timing import Timing
from bench.sim.worker import SimWorker, Unpaced

_LEAST_TOKENS = 32


class FixedChunk(Unpaced):
    """What decoding leaves of a chunk."""

    def max_prompt_tokens(
        self, num_decodes: int, *, num_before: int = 0, waited_s: float = 0.0
    ) -> int:
        """Of the next step."""
        return max(self._max_tokens - num_decodes, _LEAST_TOKENS)


class Colocated:
    """`bench.sim.system.System` with so many such workers."""

    def __init__(
        self, workers: int, chunk: int, timing: Timing, agenda: Agenda, *, block_size: int = 16
    ) -> None:
        shape = unbounded_shape(timing, block_size, prompts_at_once=1)
        self._workers = [
            ReservingWorker(f"worker-{i}", shape, timing, agenda, FixedChunk(chunk))
            for i in range(workers)
        ]

    @property
    def workers(self) -> list[SimWorker]:
        return [each.worker for each in self._workers]

    def start(self) -> None:
        """Nothing is to be started."""

    def submit(self, outcome: Outcome) -> None:
        fewest = min(self._workers, key=lambda each: each.num_requests)
        fewest.num_requests += 1
        fewest.read(outcome)
