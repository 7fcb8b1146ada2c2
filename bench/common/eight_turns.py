"""The published sweep's program: eight turns, tools of half a second; and Poisson arrivals.

Its prompts as measured there (table 1): 92, 1840, 3449, 6025, 7454, 10299, 12333, 13193 tokens, 80
of the first one in common; 20 tokens per answer. `poisson` for 45 s gives 54, 133, 255, 433, 665
programs at 1, 3, 6, 10, 15 per second with seed 42, as there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.common.plans import Added

SHARED, ANSWER, WINDOW_S, TOOL_S = 80, 20, 45.0, 0.5
TOOL_TOKENS = (1728, 1589, 2556, 1409, 2825, 2014, 840)  # what each tool call returned
TURNS = (Added(92, ANSWER), *(Added(tokens, ANSWER, TOOL_S) for tokens in TOOL_TOKENS))


def poisson(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """When programs arrive, until `duration_s`."""
    rng = random.Random(seed)
    now = rng.expovariate(rate)
    while now < duration_s:
        yield now
        now += rng.expovariate(rate)
