"""How many prompt tokens a step may take beside sequences that are decoding.

Every decoding sequence waits for the whole step, so its inter-token latency (ITL) is the step's
time. The pacer learns what steps cost here and gives prompts what a target leaves.
"""

import math

from core.messages import StepCost
from engine.step_cost import StepCostFit

# Weight of a new step in the factor by which all steps are slower than their law just now.
_NEW = 0.2
_LEAST_SLOWNESS, _MOST_SLOWNESS = 0.25, 8.0
# The law is worked out again after so many steps with prompts, and after each of the first ones.
_STEPS_PER_LAW = 8
# Of the target, what a step keeps for itself however long somebody has waited for it.
_LEAST_SHARE = 0.5


class StepPacer:
    """Learns from each step; answers for the next one.

    Without a target (None) a step takes prompts up to `max_tokens`, as a worker does that decodes
    nothing. With one, at least `min_tokens`, so that a prompt gets on whatever decoding costs.

    A step with prompts is expected to take what the law fitted to such steps says: a base, a part
    for each sequence, prompt token, and pair of tokens (`engine.step_cost`). Short chunks and long
    ones, at a prompt's beginning and far behind it, then all come out near the target. What the
    machine's other work changes from one moment to the next is one factor on all of it.
    """

    def __init__(self, *, target_s: float | None, max_tokens: int, min_tokens: int = 16) -> None:
        if target_s is not None and target_s <= 0:
            raise ValueError(f"an ITL target of {target_s} s")
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._min_tokens = min(min_tokens, max_tokens)
        self._law: StepCost | None = None
        self._law_readings = 0
        self._slowness = 1.0
        self.step_s = 0.0
        # What the scheduler reckons with.
        self.cost = StepCostFit()

    def observe(
        self,
        *,
        num_decodes: int,
        num_prompt_tokens: int,
        compute_s: float,
        num_pairs: float = 0.0,
    ) -> None:
        """One step is over. `num_pairs`: its prompt tokens, each times what it attends to."""
        self.step_s = compute_s
        if self._law is not None and num_prompt_tokens >= self._min_tokens:
            expected_s = _step_s(self._law, num_decodes, num_prompt_tokens, num_pairs)
            if expected_s > 0:
                ratio = min(max(compute_s / expected_s, _LEAST_SLOWNESS), _MOST_SLOWNESS)
                self._slowness += _NEW * (ratio - self._slowness)
        self.cost.observe(
            num_decodes=num_decodes,
            num_prompt_tokens=num_prompt_tokens,
            num_pairs=num_pairs,
            compute_s=compute_s,
        )
        due = self._law_readings + (
            1 if self._law_readings < 2 * _STEPS_PER_LAW else _STEPS_PER_LAW
        )
        if self.cost.num_readings >= due:
            self._law_readings = self.cost.num_readings
            self._law = self.cost.reading()

    def max_prompt_tokens(
        self, num_decodes: int, *, num_before: int = 0, waited_s: float = 0.0
    ) -> int:
        """The most prompt tokens of the next step, at least 1.

        `num_before`: tokens of the prompt that are computed already. `waited_s`: for how long a
        sequence that has its last token already has waited for this step to begin, as one does that
        was handed over during the step before. Its gap is to end in time, so the step is shorter.
        """
        if self._target_s is None:
            return self._max_tokens
        law = self._law
        if law is None or law.token_s <= 0:  # nothing is known yet: begin gently
            return self._min_tokens
        target_s = max(self._target_s - waited_s, _LEAST_SHARE * self._target_s)
        left_s = target_s / self._slowness - law.base_s - law.decode_s * num_decodes
        tokens = _tokens_within(left_s, law.token_s + law.pair_s * num_before, law.pair_s / 2)
        return max(self._min_tokens, min(self._max_tokens, tokens))

    def prompt_tokens_per_s(self, num_decodes: int) -> float:
        """Prompt tokens per second of compute at this load; 0 while nothing is known."""
        if self._law is None:
            return 0.0
        tokens = self.max_prompt_tokens(num_decodes)
        step_s = _step_s(self._law, num_decodes, tokens, tokens * tokens / 2)
        return tokens / (self._slowness * step_s) if step_s > 0 else 0.0


def _step_s(law: StepCost, num_decodes: int, num_tokens: int, num_pairs: float) -> float:
    """What a step with prompts takes by the law."""
    decoding_s = law.base_s + law.decode_s * num_decodes
    return decoding_s + law.token_s * num_tokens + law.pair_s * num_pairs


def _tokens_within(left_s: float, token_s: float, square_s: float) -> int:
    """The largest n of which token_s * n + square_s * n² is within `left_s`; token_s > 0."""
    if left_s <= 0:
        return 0
    # The quadratic's root in the form that needs no division by a square_s of 0.
    root_s = math.sqrt(token_s * token_s + 4 * square_s * left_s)
    return int(2 * left_s / (token_s + root_s))
