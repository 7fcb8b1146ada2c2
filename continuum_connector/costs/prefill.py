"""How long each engine step took, and from that, what it costs to prefill a prompt.

A step takes base + per_token * new + per_pair * new * (cached + new / 2) + per_decode * decodes
+ per_context * decode context: linear layers, attention, the same for generating requests,
and launch and weight reads in the base. The paper fits a parabola to one prompt's time
(section 4.2); this is that parabola, with the cached prefix and a mixed batch told apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from continuum_connector.costs.fit import RobustFit

# We look at one in so many of the steps that only decode: they are alike, and there are thousands
# between two prompts.
DECODES_PER_LOOK = 8
# Steps in flight at once: 2 under async scheduling, one per stage of a pipeline.
MAX_IN_FLIGHT = 64


class Work(NamedTuple):
    """What one step computes.

    `num_new`: prompt tokens. `pairs`: attention over them, the sum over prompts of new tokens
    times the tokens in front of each on average, new * (cached + new / 2). `num_decodes`:
    requests that generate. `decode_context`: tokens that those attend to, over all of them.
    """

    num_new: int = 0
    pairs: float = 0.0
    num_decodes: int = 0
    decode_context: int = 0

    @classmethod
    def of(
        cls,
        scheduled: Mapping[str, int],
        num_requests: int,
        computed: Callable[[str], int],
        context: int,
        drafts: Mapping[str, Sequence[int]],
    ) -> Work:
        """Add up the requests of a step. `scheduled`: tokens by request, of those that get more
        than one; others may be left out, and `num_requests` counts all. `drafts`: those of the
        tokens that are drafts. `computed`: how many tokens come before a prompt's. `context`: how
        many come before those of all requests."""
        num_new, pairs = 0, 0.0
        for request, num in scheduled.items():
            if num != 1 and num - len(drafts.get(request, ())) != 1:  # a prompt
                cached = computed(request)
                num_new += num
                pairs += num * (cached + num / 2)
                num_requests -= 1
                context -= cached
        return cls(num_new, pairs, num_requests, context)

    def __bool__(self) -> bool:
        return bool(self.num_new or self.num_decodes)


class StepClock:
    """Pairs each schedule() with its update_from_output(), which come in the same order.

    A step begins when it was scheduled, or when the step before it was done if that was later
    (async scheduling, pipelines), and ends when its output arrives. Steps that compute nothing are
    not timed, but end the one before.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Work | None, float]] = deque(maxlen=MAX_IN_FLIGHT)
        self._last_done = 0.0
        self._num_steps = 0

    @property
    def skips_decodes(self) -> bool:
        """Whether the coming step, if it only decodes, need not say what it computes."""
        return bool(self._num_steps % DECODES_PER_LOOK)

    def scheduled(self, work: Work | None, now: float) -> None:
        """schedule() has built a step. `work` is None if we do not look at it."""
        self._num_steps += 1
        self._in_flight.append((work, now))

    def done(self, now: float) -> tuple[Work, float] | None:
        """A step's output has arrived: return what it computed and how many seconds it took, or
        None."""
        if not self._in_flight:
            return None
        work, began = self._in_flight.popleft()
        began = max(began, self._last_done)
        self._last_done = now
        return (work, now - began) if work and now > began else None


# Five costs need five unlike steps; with three times as many, no single step decides.
MIN_STEPS = 16
# Until then, the better rate of two steps that computed enough for their base not to matter much.
# It is rather too slow than too fast, but it gives a server's first minute something to go by.
MIN_FIRST_STEPS, MIN_FIRST_TOKENS = 2, 128


class PrefillModel:
    """`chunk`: tokens that one step computes at most (max_num_batched_tokens)."""

    def __init__(self, chunk: int) -> None:
        self._chunk = max(1, chunk)
        self._fit = RobustFit(5)
        self.num_steps = 0  # those with prompt tokens
        self._num_first_steps = 0
        self._first_rate = math.inf  # seconds per token
        self._prior = (0.0, 0.0, 0.0)  # seconds: base, per_token, per_pair

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from enough steps."""
        return self.num_steps >= MIN_STEPS

    @property
    def is_roughly_known(self) -> bool:
        """Whether `seconds` answers from something that was measured, not from the prior."""
        return self.is_known or self._num_first_steps >= MIN_FIRST_STEPS

    def assume(self, prior: tuple[float, float, float]) -> None:
        """What `seconds` answers with until something was measured: base, per_token, per_pair."""
        self._prior = prior

    def add(self, work: Work, seconds: float) -> None:
        """A step that computed `work` took `seconds`."""
        self._fit.add((1.0, *work), seconds)
        self.num_steps += work.num_new > 0
        if not self.is_known and work.num_new >= MIN_FIRST_TOKENS and seconds > 0.0:
            self._num_first_steps += 1
            self._first_rate = min(self._first_rate, seconds / work.num_new)

    def seconds(self, num_new: int, num_cached: int = 0) -> float:
        """Seconds to prefill `num_new` tokens behind `num_cached`, with the engine to itself.

        Counts the base once for each step that it takes. 0.0 without a prior while nothing is
        known: then a kept block is worth nothing, and turns are served as without us.
        """
        if num_new <= 0:
            return 0.0
        base, per_token, per_pair = self._costs()
        num_steps = -(-num_new // self._chunk)
        pairs = num_new * (num_cached + num_new / 2)
        return num_steps * base + per_token * num_new + per_pair * pairs

    def _costs(self) -> tuple[float, float, float]:
        """Base, per_token and per_pair, from the best that is known."""
        if self.is_known:
            base, per_token, per_pair, _, _ = self._fit.coefficients
            return base, per_token, per_pair
        return (0.0, self._first_rate, 0.0) if self.is_roughly_known else self._prior
