"""StepBudget: how much of a step's time may go into reading, and how much text that buys."""

from __future__ import annotations

MIN_TOKENS = 64  # fewer hold no call
SHARE = 0.2  # of the newest sample in the running mean
MAX_JUMP = 4.0  # a sample counts as at most that many means: one page fault is no trend
FORGET = 0.8  # the mean after each refusal: else one bad estimate would never be tried again


class StepBudget:
    """Seconds per token as a running mean, and what is left of this step's budget."""

    def __init__(self, budget_s: float, seconds_per_token: float) -> None:
        self._budget_s = self._left_s = budget_s
        self.seconds_per_token = seconds_per_token

    def new_step(self) -> None:
        """A step of the engine begins: its budget is whole."""
        self._left_s = self._budget_s

    def affordable(self, num_tokens: int) -> int:
        """How many of `num_tokens` can be read now; 0 if too few to be worth it."""
        affordable = min(num_tokens, int(self._left_s / self.seconds_per_token))
        if affordable < min(MIN_TOKENS, num_tokens):
            if self._left_s == self._budget_s:  # not even in a step of its own
                self.seconds_per_token *= FORGET
            return 0
        return affordable

    def spent(self, num_tokens: int, duration_s: float) -> None:
        """So many tokens took so long."""
        self._left_s -= duration_s
        sample = duration_s / max(1, num_tokens)
        sample = min(sample, MAX_JUMP * self.seconds_per_token)
        self.seconds_per_token += SHARE * (sample - self.seconds_per_token)
        self.seconds_per_token = max(self.seconds_per_token, 1e-9)
