"""PrefillModel: seconds to prefill, fitted over the engine's steps while it serves.

A step takes base + per_token * new + per_pair * new * (cached + new / 2) + per_decode * decodes
+ per_context * decode context: linear layers, attention, the same for generating requests,
and launch and weight reads in the base. The paper fits a parabola to one prompt's time
(section 4.2); this is that parabola, with the cached prefix and a mixed batch told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from continuum_connector.costs.fit import RobustFit
from continuum_connector.costs.step_clock import Work

# Five costs need five unlike steps; three times that, and no single step decides.
MIN_STEPS = 16
# Until then: the best rate of two steps that computed enough for their base not to matter much.
# It is too slow rather than too fast, but a server's first minute is served by it, not by nothing.
MIN_FIRST_STEPS, MIN_FIRST_TOKENS = 2, 128


class PrefillModel:
    """`chunk`: tokens that one step computes at most (max_num_batched_tokens)."""

    def __init__(self, chunk: int) -> None:
        self._chunk = max(1, chunk)
        self._fit = RobustFit(5)
        self.num_steps = 0  # with prompt tokens in them
        self._num_first_steps = 0
        self._first_rate = math.inf  # seconds per token

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from a seed or from enough steps."""
        return self._fit.is_seeded or self.num_steps >= MIN_STEPS

    @property
    def is_roughly_known(self) -> bool:
        """Whether it answers at all."""
        return self.is_known or self._num_first_steps >= MIN_FIRST_STEPS

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds: base, per_token, per_pair, per_decode, per_context."""
        return self._fit.coefficients

    def seed(self, coefficients: Sequence[float]) -> None:
        """Start from coefficients measured before, on this model and GPU."""
        self._fit.seed(coefficients)

    def add(self, work: Work, seconds: float) -> None:
        """A step that computed `work` took `seconds`."""
        self._fit.add((1.0, *work), seconds)
        self.num_steps += work.num_new > 0
        if not self.is_known and work.num_new >= MIN_FIRST_TOKENS and seconds > 0.0:
            self._num_first_steps += 1
            self._first_rate = min(self._first_rate, seconds / work.num_new)

    def seconds(self, num_new: int, num_cached: int = 0) -> float:
        """Seconds to prefill `num_new` tokens behind `num_cached`, with the engine to itself.

        Counts the base once per step it takes. 0.0 while nothing is known: then a kept block
        is worth nothing and turns are served as without us.
        """
        if num_new <= 0 or not self.is_roughly_known:
            return 0.0
        if not self.is_known:
            return num_new * self._first_rate
        base, per_token, per_pair, _, _ = self._fit.coefficients
        num_steps = -(-num_new // self._chunk)
        pairs = num_new * (num_cached + num_new / 2)
        return num_steps * base + per_token * num_new + per_pair * pairs
