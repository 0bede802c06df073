"""What a simulated cluster of this code is: workers and settings, as `core.config` has them."""

from dataclasses import dataclass
from typing import Literal

from bench.sim.timing import Timing
from bench.sim.worker import WorkerShape
from core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """The settings' names and meanings are those of docs/configuration.md.

    `prefill_step_tokens` is a prefill worker's `max_step_tokens`. `max_new_tokens` is what requests
    say of their answers: a scheduler cannot know how long they will be.
    """

    prefill_workers: int = 1
    decode_workers: int = 1
    block_size: int = 16
    prefill_step_tokens: int = 8192
    decode_step_tokens: int = 8192
    max_seqs: int = 512
    itl_target_s: float = 0.018
    local_prefill: Literal["auto", "never", "always"] = "auto"
    reserve_answer_tokens: int = 256
    report_interval_s: float = 1.0
    max_queued: int = 1_000_000
    prefix_cache: bool = False
    max_new_tokens: int = 4096
    timeout_s: float = 600.0
    # Workers turn between the roles, as `scheduler.elastic` has it.
    elastic: Literal["off", "auto"] = "off"

    def checked(self, timing: Timing) -> "ClusterShape":
        """Itself. Raises ConfigError for what no cluster can be."""
        if self.prefill_workers < 0 or self.decode_workers < 1:
            raise ConfigError(
                f"{self.prefill_workers} prefill and {self.decode_workers} decode workers: "
                "at least one decode worker is needed"
            )
        if self.prefill_workers == 0 and self.local_prefill == "never":
            raise ConfigError("local_prefill is never and there is no prefill worker")
        if self.elastic == "auto":
            if self.prefill_workers < 1:
                raise ConfigError("elastic is auto and there is no prefill worker: begin with one")
            if self.prefill_step_tokens != self.decode_step_tokens:
                raise ConfigError(
                    f"elastic is auto: prefill_step_tokens {self.prefill_step_tokens} and "
                    f"decode_step_tokens {self.decode_step_tokens} are one worker's"
                )
        if self.block_size < 1 or timing.kv_tokens < self.block_size:
            raise ConfigError(
                f"a block of {self.block_size} tokens: a worker's memory holds KV for "
                f"{timing.kv_tokens}"
            )
        for name in ("prefill_step_tokens", "decode_step_tokens", "max_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.itl_target_s < float("inf"):
            raise ConfigError(f"itl_target_s must be at least 0, not {self.itl_target_s:g}")
        return self

    def worker(self, timing: Timing, *, prefill: bool) -> WorkerShape:
        """Of one of its workers."""
        return WorkerShape(
            num_blocks=timing.kv_tokens // self.block_size,
            block_size=self.block_size,
            max_step_tokens=self.prefill_step_tokens if prefill else self.decode_step_tokens,
            max_seqs=self.max_seqs,
        )
