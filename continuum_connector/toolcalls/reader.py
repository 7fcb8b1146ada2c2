"""ToolReader: what a finished turn asks for, from its last output tokens, within a budget.

Decoding and parsing happen in the scheduler's step, so each step has BUDGET_S for them. Beyond the
budget it reads fewer tokens, or answers Asked UNREAD with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from continuum_connector.toolcalls.asked import UNREAD, Asked, Ending
from continuum_connector.toolcalls.parse import parse
from continuum_connector.toolcalls.tokenizer import BackgroundTokenizer, Markers, Span, markers_of

TAIL_TOKENS = 512  # calls are short
HEAD_TOKENS = 128  # read of a call that began before the tail: its name, and most of its keys
LOOK_BACK_TOKENS = 4096  # how far back we search for its beginning, by token id
BUDGET_S = 1e-3  # per step
FIRST_SECONDS_PER_TOKEN = 2e-6  # until the warm-up has measured it
CUT = Asked(Ending.CUT)


class ToolReader:
    """Reads tool calls. For each turn that it does not read, it reports the reason."""

    def __init__(
        self,
        tokenizer: BackgroundTokenizer,
        timer: Callable[[], float],
        not_read: Callable[[str], None],
        budget_s: float = BUDGET_S,
    ) -> None:
        """`timer`: time.perf_counter, or a fake. `not_read`: called with a reason of WHY_UNREAD."""
        self._tokenizer = tokenizer
        self._timer = timer
        self._budget = StepBudget(budget_s, FIRST_SECONDS_PER_TOKEN)
        self._markers = Markers()
        self._told = not_read
        tokenizer.when_loaded(self._warm_up)

    @property
    def seconds_per_token(self) -> float:
        """What it costs to read a token, as a running mean."""
        return self._budget.seconds_per_token

    def start(self) -> None:
        """Begin to load the tokenizer; call it when the first turn arrives."""
        self._tokenizer.start()

    def new_step(self) -> None:
        """A step of the engine begins."""
        self._budget.new_step()

    def read(self, output_token_ids: Sequence[int], *, truncated: bool = False) -> Asked:
        """Say what the turn with this output asks for. It never raises.

        `truncated`: the turn ended at its token limit or at the model's.
        """
        tokenizer = self._tokenizer.get()
        if tokenizer is None:
            return self._not_read("no_tokenizer")
        if not output_token_ids:
            return CUT
        if not self._budget.affordable(min(len(output_token_ids), TAIL_TOKENS)):
            return self._not_read("no_time")
        begin_s = self._timer()
        num_tokens = 0
        try:
            token_ids, is_cut, headless = self._choose(output_token_ids)
            num_tokens = len(token_ids)
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            asked = parse(text, truncated=truncated and not is_cut, headless=headless)
        except Exception:  # a tokenizer may raise on any id; the step must go on
            asked = UNREAD
        finally:
            self._budget.spent(num_tokens, self._timer() - begin_s)
        if asked is UNREAD:
            return self._not_read("error")
        return asked

    def _choose(self, output_token_ids: Sequence[int]) -> tuple[list[int], bool, bool]:
        """Choose the tokens to decode.

        Also return whether the end of a call is left out, and whether the beginning is missing.
        """
        tail = list(output_token_ids[-TAIL_TOKENS:])
        span = self._markers.span(tail)
        if span.is_late and len(output_token_ids) > TAIL_TOKENS:
            earlier = list(output_token_ids[-LOOK_BACK_TOKENS:-TAIL_TOKENS])
            begin = self._markers.last_call(earlier)
            if begin >= 0:
                return (earlier[begin:] + tail)[:HEAD_TOKENS], True, False
        return self._within_budget(tail, span, len(output_token_ids) > TAIL_TOKENS)

    def _within_budget(
        self, tail: list[int], span: Span, is_longer: bool
    ) -> tuple[list[int], bool, bool]:
        """Cut to the budget: keep the beginning of a call, but the end of any other text."""
        wanted = tail[span.begin :]
        affordable = self._budget.affordable(len(wanted)) or len(wanted)
        if span.at_call:
            return wanted[:affordable], affordable < len(wanted), False
        headless = affordable < len(wanted) or (is_longer and span.begin == 0)
        return wanted[len(wanted) - affordable :], False, headless

    def _not_read(self, reason: str) -> Asked:
        self._told(reason)
        return UNREAD

    def _warm_up(self, tokenizer: Any) -> None:
        """In the background, learn the markers and what a token costs once everything is warm."""
        self._markers = markers_of(tokenizer)
        token_ids = list(range(TAIL_TOKENS))
        for _ in range(2):
            begin_s = self._timer()
            try:
                parse(tokenizer.decode(token_ids, skip_special_tokens=False))
            except Exception:  # the vocabulary is smaller; the first reads will measure
                return
            duration_s = self._timer() - begin_s
        self._budget.seconds_per_token = max(duration_s / TAIL_TOKENS, 1e-9)


MIN_TOKENS = 64  # fewer hold no call
SHARE = 0.2  # of the newest sample in the running mean
MAX_JUMP = 4.0  # a sample counts as at most so many means, because one page fault is no trend
FORGET = 0.8  # what each refusal multiplies the mean by, or one bad estimate would stay for ever


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
        """Reading `num_tokens` took `duration_s`."""
        self._left_s -= duration_s
        sample = duration_s / max(1, num_tokens)
        sample = min(sample, MAX_JUMP * self.seconds_per_token)
        self.seconds_per_token += SHARE * (sample - self.seconds_per_token)
        self.seconds_per_token = max(self.seconds_per_token, 1e-9)
