"""StepClock: how long each engine step took, seen from the scheduler alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Of steps that only decode one in so many is looked at: they are alike, and there are thousands
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
        """Add up requests: tokens scheduled and drafts among them, by request, of those that get
        more than one; others may be left out of all `num_requests`. `computed`: tokens before
        them, of a prompt's, and `context` of all."""
        prompts = [
            (num, computed(request))
            for request, num in scheduled.items()
            if num != 1 and num - len(drafts.get(request, ())) != 1
        ]
        return cls(
            sum(num for num, _ in prompts),
            sum(num * (cached + num / 2) for num, cached in prompts),
            num_requests - len(prompts),
            context - sum(cached for _, cached in prompts),
        )

    def __bool__(self) -> bool:
        return bool(self.num_new or self.num_decodes)


class StepClock:
    """Pairs each schedule() with its update_from_output(), which come in the same order.

    A step took from when it was scheduled, or from when the step before it was done if that
    was later (async scheduling, pipelines), until its own output arrived. Steps that compute
    nothing have no time, but end the one before.
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
        """schedule() has put a step together; None: it is not looked at."""
        self._num_steps += 1
        self._in_flight.append((work, now))

    def done(self, now: float) -> tuple[Work, float] | None:
        """A step's output is there: what it computed and the seconds it took, or None."""
        if not self._in_flight:
            return None
        work, began = self._in_flight.popleft()
        began = max(began, self._last_done)
        self._last_done = now
        return (work, now - began) if work and now > began else None
