"""What a pin is worth, by when its program is expected back. Seconds, and block-seconds.

P(t) is the probability of a return within t, H(t) how long a pin of TTL t is held on average,
both from the forecast. A pin whose program returns early costs only until then, so it is
charged H(t), where Continuum's paper charges the whole t.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv

from continuum_connector.costs.forecast import EDGES, Forecast

_NOBODY = 1e-6  # a share of programs


@dataclass(frozen=True)
class Stake:
    """What is at stake when a turn ends, apart from when its program will be back.

    `pinned_s`: seconds saved by a return to a pin. `stored_s`: seconds saved by one that finds
    the blocks in DRAM, 0 if they are not to be stored; `p_stored`: the probability that it does.
    `weight`: how many average turns the blocks are (Continuum's MemUsage / M). `cost`: seconds
    that all others lose for each second of the pin.
    """

    pinned_s: float
    stored_s: float
    p_stored: float
    weight: float
    cost: float

    def gain(self, forecast: Forecast, ttl_s: float) -> float:
        """Net seconds that a pin of `ttl_s` adds to what a store alone is worth."""
        return self.saved([forecast.within(ttl_s)])[0] - self.cost * forecast.held(ttl_s)

    def saved(self, shares: Sequence[float]) -> list[float]:
        """Seconds that a pin adds to a store if such shares of programs are back within its TTL."""
        pinned_s, stored_s = self.weight * self.pinned_s, self.weight * self.stored_s
        # Of those, the ones that DRAM would have served too gain less.
        served, most = pinned_s - stored_s, self.p_stored * stored_s
        return [p * served if p < self.p_stored else p * pinned_s - most for p in shares]


@dataclass(frozen=True)
class BestPin:
    """The TTL that gains most (0: none does), what it gains, and its break-even price.

    `value` is the highest cost per second at which a pin of any TTL would still be worth
    keeping, divided by the turn's blocks.
    """

    ttl_s: float
    gain: float
    value: float


def best_pin(forecast: Forecast, stake: Stake, num_blocks: int, max_ttl_s: float) -> BestPin:
    """Return the best TTL of 0 and EDGES, the shorter of two that gain the same.

    No TTL between two edges gains more than the better of the two: between them P is linear
    and H falls off as P rises, so the gain is convex there.
    """
    num_edges = bisect_right(EDGES, max_ttl_s)
    held = forecast.held_at[:num_edges]
    saved = stake.saved(forecast.cdf[:num_edges])
    gains = [s - stake.cost * h for s, h in zip(saved, held, strict=True)]
    best = max(gains, default=0.0)
    value = max(map(truediv, saved, held), default=0.0) / num_blocks
    return BestPin(EDGES[gains.index(best)] if best > 0.0 else 0.0, max(best, 0.0), value)


def longest_pin(forecast: Forecast, stake: Stake, limit_s: float) -> float:
    """Return the longest TTL of `limit_s` and EDGES below it that costs no more than it saves.

    0 if there is none.
    """
    if stake.gain(forecast, limit_s) >= 0.0:
        return limit_s
    num_edges = bisect_left(EDGES, limit_s)
    # All gains in one pass: asking for one after the other takes ten times as long.
    saved, held = stake.saved(forecast.cdf[:num_edges]), forecast.held_at
    longest = (i for i in reversed(range(num_edges)) if saved[i] >= stake.cost * held[i])
    return next((EDGES[index] for index in longest), 0.0)


def soonest(forecast: Forecast, age: float) -> float:
    """Seconds of keeping that one return takes at best, given no return for `age` seconds.

    The least H / P over all times to give up at: the remaining gap where it is known, more
    where a return is unsure. Infinite if none is expected any more. Its inverse is the Gittins
    index of the kept blocks, so a program that will likely be back in 1 s or else never is
    not confused with one that is away for an hour for sure.
    """
    p_now, best = forecast.within(age), math.inf
    most = forecast.cdf[-1] - p_now
    if most <= _NOBODY:
        return best
    held_now, first = forecast.held(age), bisect_right(EDGES, age)
    # A plain loop that stops early, for this is asked for dozens of programs at a time.
    for p, held in zip(forecast.cdf[first:], forecast.held_at[first:], strict=True):
        if held - held_now >= best * most:  # even if all of them were back by then
            break
        if p - p_now > _NOBODY and held - held_now < best * (p - p_now):
            best = (held - held_now) / (p - p_now)
    return best
