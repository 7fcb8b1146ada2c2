"""Memoryfulness: does a program's age say how much longer it runs? (paper 4.2, eta)"""

from __future__ import annotations

import math
from collections.abc import Sequence

# A correlation over n programs is uncertain by about 1 / sqrt(n): 0.22 here. Below that the
# paper's cold start holds: every program takes the same number of turns, eta = 1.
MIN_PROGRAMS = 20
# Turns, some 500 programs; a server's agents change with deployments, not by the minute. By
# turns, so that a crowd of short programs does not drive out what a few long ones taught.
HALF_LIFE = 5000


class Memoryfulness:
    """eta = -Corr(k, N - k) over the turns k = 1..N of finished programs of N turns.

    1: all programs have the same length; 0: the number left is the same at any age; below
    0: the older a program, the more is still to come. Sums in closed form, O(1) a program.
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self._sums = [0.0] * 6  # of 1, k, left, k * k, left * left, k * left; left = N - k

    @property
    def is_known(self) -> bool:
        """Whether enough programs have finished."""
        return self.num_programs >= MIN_PROGRAMS

    def program_over(self, num_turns: int) -> None:
        """A program finished after `num_turns` turns; one of none says nothing."""
        n = num_turns
        if n < 1:
            return
        self.num_programs += 1
        terms = (
            n,
            n * (n + 1) / 2,
            n * (n - 1) / 2,
            n * (n + 1) * (2 * n + 1) / 6,
            (n - 1) * n * (2 * n - 1) / 6,
            n * (n + 1) * (n - 1) / 6,
        )
        decay = 0.5 ** (n / HALF_LIFE)
        self._sums = [s * decay + t for s, t in zip(self._sums, terms, strict=True)]

    @property
    def eta(self) -> float:
        """Memoryfulness, -1 to 1; 1 until enough programs have finished."""
        if not self.is_known:
            return 1.0
        one, k, left, kk, ll, kl = self._sums
        if one < 1.0:  # a state file that somebody wrote by hand
            return 1.0
        var_k, var_left = kk / one - (k / one) ** 2, ll / one - (left / one) ** 2
        if min(var_k, var_left) < 1e-9:  # programs of one turn only: all the same length
            return 1.0
        correlation = (kl / one - k * left / one**2) / math.sqrt(var_k * var_left)
        return min(1.0, max(-1.0, -correlation))

    def state(self) -> list[float]:
        """What `restore` takes: the number of programs, then the sums."""
        return [float(self.num_programs), *self._sums]

    def restore(self, state: Sequence[float]) -> None:
        """Go on from a `state`, checked by costs.py."""
        self.num_programs = int(state[0])
        self._sums = list(state[1:])
