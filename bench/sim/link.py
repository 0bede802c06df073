"""The way from one worker's KV pool to another's: one transfer after the other."""

from bench.sim.timing import Timing


class Link:
    """Chunks queue; each begins beside the step that computes it, layer by layer."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._free_s = 0.0
        self.busy_s = 0.0
        self.num_bytes = 0

    def push(
        self, num_tokens: int, num_blocks: int, *, step_began_s: float, step_ended_s: float
    ) -> float:
        """When the last byte of what the step computed is there.

        The first layer can leave when it is computed, the last one not before the step's end.
        """
        timing = self._timing
        takes_s = timing.transfer_s(num_tokens, num_blocks)
        first_layer_s = step_began_s + (step_ended_s - step_began_s) / timing.num_layers
        begins_s = max(self._free_s, first_layer_s)
        arrives_s = max(begins_s + takes_s, step_ended_s + takes_s / timing.num_layers)
        self._free_s = arrives_s
        self.busy_s += takes_s
        self.num_bytes += num_tokens * timing.kv_token_bytes
        return arrives_s
