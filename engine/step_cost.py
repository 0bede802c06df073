"""What a step costs on this worker, fitted to the steps that it has computed.

Two least-squares fits over observations that fade: steps that only decode give the step's base and
the cost of a sequence; what steps with prompts take beyond that gives the cost of a prompt's token,
and of each pair of a token and one that it attends to, which is what makes long prompts dear.
Errors count relative to a step's time, so that short steps are fitted as well as long ones.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from core.messages import StepCost

_KEPT = 0.98  # of what was learned, per observation
# Small beside any measurement: it only decides between terms that came together every time.
_RIDGE = 1e-6
# Steps with prompts before their base is told apart from their tokens, and attention from both:
# from fewer, a noisy step would be taken for a law.
_FEWEST_FOR_BASE = 4
_FEWEST_FOR_PAIRS = 16


class FadingFit:
    """y as a sum of terms with coefficients of at least 0, by weighted least squares."""

    def __init__(self, num_terms: int) -> None:
        self._products = np.zeros((num_terms, num_terms))
        self._targets = np.zeros(num_terms)
        self.num_seen = 0

    def add(self, terms: tuple[float, ...], y: float) -> None:
        """One observation: the terms' sizes, and what they came to."""
        if y <= 0:
            return
        row = np.asarray(terms) / y
        self._products = _KEPT * self._products + np.outer(row, row)
        self._targets = _KEPT * self._targets + row
        self.num_seen += 1

    def solve(self, terms: Collection[int] | None = None) -> tuple[float, ...]:
        """The coefficients; 0 for a term that never came, or that would be below 0.

        With `terms` only these are fitted, and the others are 0.
        """
        scale = np.sqrt(np.diag(self._products))
        result = np.zeros(len(scale))
        used = [i for i, size in enumerate(scale) if size > 0 and (terms is None or i in terms)]
        while used:
            own = scale[used]
            products = self._products[np.ix_(used, used)] / np.outer(own, own)
            solved = np.linalg.solve(
                products + _RIDGE * np.eye(len(used)), self._targets[used] / own
            )
            if (lowest := int(np.argmin(solved))) >= 0 and solved[lowest] >= 0:
                result[used] = solved / own
                break
            del used[lowest]
        return tuple(float(value) for value in result)


class StepCostFit:
    """Learns from each step; gives what it has learned as it is told to the scheduler."""

    def __init__(self) -> None:
        self._decoding = FadingFit(2)  # base, per sequence
        self._reading = FadingFit(3)  # base, per token, per pair

    def observe(
        self, *, num_decodes: int, num_prompt_tokens: int, num_pairs: float, compute_s: float
    ) -> None:
        """One step is over. `num_pairs`: prompt tokens, each times what it attends to."""
        if num_prompt_tokens == 0:
            self._decoding.add((1.0, float(num_decodes)), compute_s)
            return
        _, decode_s = self._decoding.solve() if self._decoding.num_seen else (0.0, 0.0)
        beside_s = max(compute_s - decode_s * num_decodes, 0.1 * compute_s)
        self._reading.add((1.0, float(num_prompt_tokens), num_pairs), beside_s)

    @property
    def num_readings(self) -> int:
        """Steps with prompts that were seen."""
        return self._reading.num_seen

    def cost(self) -> StepCost | None:
        """None until prompts were read. The base is that of steps that only decode, if any did."""
        reading = self.reading()
        if reading is None or not self._decoding.num_seen:
            return reading
        base_s, _ = self._decoding.solve()
        return replace(reading, base_s=base_s or reading.base_s)

    def reading(self) -> StepCost | None:
        """The same, with the base of steps that have prompts; None until some had."""
        if not self._reading.num_seen:
            return None
        terms = [1]
        if self._reading.num_seen >= _FEWEST_FOR_BASE:
            terms.append(0)
        if self._reading.num_seen >= _FEWEST_FOR_PAIRS:
            terms.append(2)
        base_s, token_s, pair_s = self._reading.solve(terms)
        _, decode_s = self._decoding.solve() if self._decoding.num_seen else (0.0, 0.0)
        return StepCost(base_s=base_s, decode_s=decode_s, token_s=token_s, pair_s=pair_s)
