"""Adaptive: each alternative is priced in seconds that all programs together gain; the best wins.

    free       0
    offload    k * P(residence) * max(0, N * prefill - load - behind)
    pin        max over tau of  k * P(tau) * N * prefill - price * blocks * H(tau)
    pin_store  offload + the same, where a return that DRAM would have served saves only
               min(N * prefill, load + behind)

All of it in seconds:

P(t)       probability that the program is back within t
H(t)       how long a pin of TTL t is held on average. A pin whose program returns early costs only
           until then, so it is charged H(t), where Continuum's paper charges the whole t.
residence  how long a stored block stays in DRAM
k          blocks / mean_blocks: how many average turns' room this turn takes
N          turns that run or wait, plus the returning one. A prefill takes the GPU's time from all
           of them, a load only its own turn's time, and
behind     the time of the turns that wait for the bus behind that load
price      what a held block costs the others per second, at least FORESEEN / mean_blocks

A place in the queue is worth nothing here: what one program gains by it, another loses.
docs/decisions.md has the reasons, and what follows for each kind of gap.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from continuum_connector.costs import QUIET
from continuum_connector.forecast import EDGES, Forecast, Row
from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Resident,
    Snapshot,
    must_free,
)

# Seconds to take and release a hold on a block, while the step waits: 1.5 ms for 6,500 blocks.
# A pin that saves less is not worth making.
HOLD_S = 0.25e-6
# The least that keeping is charged: the share of time in which a turn will wait for the room
# although the price still says that none does. It is a tenth of what the price itself counts as
# quiet: at the price's pace, a server on which nobody has waited for 3.5 minutes.
FORESEEN = QUIET / 10
# A program less likely than this to return within max_ttl_s is not pinned: nine in ten such pins
# fill VRAM for nobody, and freed blocks stay in vLLM's own prefix cache anyway.
MIN_P_BACK = 0.1
# A turn whose blocks are less likely than this to be read before they leave a full DRAM is not
# stored: nine in ten such copies are for nobody. Whether it may take another's place there is not
# asked here: the order in which blocks leave decides that.
MIN_P_READ = 0.1
# Of two programs needed equally soon the older is worth more: 1 ms per 11 days of age.
AGE_WEIGHT = 1e-9


class Adaptive:
    """KV that is needed soonest stays nearest, unless its room is worth more to others."""

    orders = True
    reads = True
    ranks_dram = True
    heeds_stock = True

    def __init__(self, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        if turn.hints.compaction:
            return Choice(Free(), "a compaction: what comes next extends an older prefix")
        can_store = snapshot.has_tier and snapshot.takes_store
        p_read = turn.gap.within(snapshot.residence_s) if can_store else 0.0
        stored_s = _stored_s(turn, snapshot, p_read)
        stake = _stake(turn, snapshot, stored_s, p_read)
        pin = best_pin(turn.gap, stake, turn.num_blocks, self._max_ttl_s)
        ttl_s, asked_for = self._with_hint(turn, snapshot, stake, pin)
        values = partial(self._values, turn, snapshot, stake, pin)
        if ttl_s:
            then = After.STORE if stored_s else After.DROP
            why = partial(_why_pin, turn, stake, ttl_s, asked_for)
            return Choice(Pin(ttl_s, then, pin.value), why, values)
        if stored_s:
            return Choice(Offload(), partial(_why_offload, turn, p_read), values)
        return Choice(Free(), partial(self._why_free, turn, snapshot, p_read), values)

    def dram_rank(self, resident: Resident, now: float) -> float:
        """Minus the seconds until the program's blocks are used next; an older program's stay
        longer."""
        away_s = 0.0
        if not resident.is_waiting:
            age = now - resident.finished if resident.finished is not None else 0.0
            away_s = resident.gap.soonest(age)
            if away_s == math.inf:  # nobody knows: as long as it was silent
                away_s = max(now - resident.last_used, age)
        return AGE_WEIGHT * (now - resident.arrival) - away_s - resident.queueing_s

    def aged(self, value: float, gap: Forecast, age: float) -> float:
        """The same seconds saved, over the room that one return takes at best from now on."""
        now_s = gap.soonest(age)
        return value * gap.soonest(0.0) / now_s if now_s < math.inf else 0.0

    def _values(
        self, turn: FinishedTurn, snapshot: Snapshot, stake: Stake, pin: BestPin
    ) -> dict[str, float]:
        """What each alternative gains. `pin` is the best pin given that `stake` is stored as
        well."""
        if not snapshot.has_tier:
            return {"free": 0.0, "pin": pin.gain}
        offload = stake.weight * stake.p_stored * stake.stored_s
        dropped = _stake(turn, snapshot, 0.0, 0.0) if stake.stored_s else stake
        alone = best_pin(turn.gap, dropped, turn.num_blocks, self._max_ttl_s)
        return {
            "free": 0.0,
            "pin": alone.gain,
            "offload": offload,
            "pin_store": offload + pin.gain,
        }

    def _with_hint(
        self, turn: FinishedTurn, snapshot: Snapshot, stake: Stake, pin: BestPin
    ) -> tuple[float, bool]:
        """The TTL, and whether the client's hint made it longer.

        A client gets what it asks for as long as that costs others no more than it saves, at the
        current price, because what it adds gives way before every other pin. 0 s means no pin.
        """
        if snapshot.pins_lose:
            return 0.0, False
        pays = (
            pin.gain > HOLD_S * turn.num_blocks and turn.gap.within(self._max_ttl_s) >= MIN_P_BACK
        )
        ttl_s = pin.ttl_s if pays else 0.0
        hint = turn.hints.ttl_s
        if hint is None:
            return ttl_s, False
        stake = replace(stake, cost=snapshot.price * turn.num_blocks)
        longest = longest_pin(turn.gap, stake, min(hint, self._max_ttl_s))
        if longest > ttl_s:
            return longest, True
        return (ttl_s if hint else 0.0), False

    def _why_free(self, turn: FinishedTurn, snapshot: Snapshot, p_read: float) -> str:
        if not turn.gap.cdf[-1]:
            return "nobody expects it back"
        if snapshot.pins_lose:
            return "no pin pays: lately, stock vLLM would have found more"
        if not snapshot.has_tier:
            p_back = turn.gap.within(self._max_ttl_s)
            back = f"{p_back:.0%} of such pauses end within {self._max_ttl_s:g} s"
            again_s = f"{turn.prefill_s:.3g} s to compute again"
            return f"no pin pays: {back}, {again_s}{_source(turn)}"
        if snapshot.num_delayed * turn.prefill_s <= turn.load_s:
            costs = f"{turn.prefill_s:.3g} s to compute, {turn.load_s:.3g} s to load"
            return f"no pin pays; {costs}{_source(turn)}"
        if not snapshot.takes_store:
            return "no pin pays, and DRAM has no room for it now"
        return (
            f"no pin pays; only {p_read:.0%} of such pauses end within the "
            f"{snapshot.residence_s:.3g} s that DRAM would keep it"
        )


def _stored_s(turn: FinishedTurn, snapshot: Snapshot, p_read: float) -> float:
    """Seconds that a return saves by finding the blocks in DRAM; 0 if they should not go there.

    Turns behind its load are left out here: by the time of the return the bus may be idle.
    """
    is_full = snapshot.residence_s < math.inf
    if not p_read or (is_full and p_read < MIN_P_READ):
        return 0.0
    return max(0.0, snapshot.num_delayed * turn.prefill_s - turn.load_s)


def _stake(turn: FinishedTurn, snapshot: Snapshot, stored_s: float, p_read: float) -> Stake:
    weight = turn.num_blocks / max(snapshot.mean_blocks, 1.0)
    return Stake(
        pinned_s=snapshot.num_delayed * turn.prefill_s,
        stored_s=max(0.0, stored_s - turn.bus_s * snapshot.num_at_bus),
        p_stored=p_read,
        weight=weight,
        cost=max(snapshot.price * turn.num_blocks, FORESEEN * weight),
    )


def _why_pin(turn: FinishedTurn, stake: Stake, ttl_s: float, asked_for: bool) -> str:
    p, held = turn.gap.within(ttl_s), turn.gap.held(ttl_s)
    saved = stake.gain(turn.gap, ttl_s) + stake.cost * held
    says = f"client asked for {turn.hints.ttl_s:g} s; " if asked_for else ""
    return (
        f"{says}{p:.0%} of such pauses end within {ttl_s:.3g} s; the blocks are held {held:.3g} s "
        f"on average: saves {saved:.3g} s, costs {stake.cost * held:.3g} s{_source(turn)}"
    )


def _why_offload(turn: FinishedTurn, p_read: float) -> str:
    return (
        f"no pin pays; {p_read:.0%} of such pauses end while it is in DRAM: "
        f"{turn.load_s:.3g} s to load, {turn.prefill_s:.3g} s to compute{_source(turn)}"
    )


def _source(turn: FinishedTurn) -> str:
    """Where the seconds come from that a prefill takes, if not from what was measured."""
    return ", from a prior" if turn.is_prior else ""


class Stake(Struct, frozen=True):
    """What is at stake when a turn ends, apart from when its program will be back.

    `pinned_s`: seconds saved by a return to a pin. `stored_s`: seconds saved by a return that finds
    the blocks in DRAM, less what the turns behind its load lose; 0 if they are not to be stored.
    `p_stored`: the probability that it does.
    `weight`: the blocks in average turns (Continuum's MemUsage / M). `cost`: seconds that all
    others lose for each second of the pin.
    """

    pinned_s: float
    stored_s: float
    p_stored: float
    weight: float
    cost: float

    def gain(self, forecast: Forecast, ttl_s: float) -> float:
        """Net seconds that a pin of `ttl_s` adds to what a store alone is worth."""
        saved = float(self.saved(np.asarray(forecast.within(ttl_s))))
        return saved - self.cost * forecast.held(ttl_s)

    def saved(self, shares: Row) -> Row:
        """Seconds that a pin adds to a store, by the share of programs that are back within its
        TTL."""
        pinned_s, stored_s = self.weight * self.pinned_s, self.weight * self.stored_s
        # Returns that DRAM would have served, too, gain less.
        served, most = pinned_s - stored_s, self.p_stored * stored_s
        return np.where(shares < self.p_stored, shares * served, shares * pinned_s - most)


class BestPin(Struct, frozen=True):
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
    if not num_edges:
        return BestPin(0.0, 0.0, 0.0)
    held = forecast.held_row[:num_edges]
    saved = stake.saved(forecast.row[:num_edges])
    gains = saved - stake.cost * held
    best = int(gains.argmax())
    gain, value = float(gains[best]), float((saved / held).max()) / num_blocks
    return BestPin(EDGES[best], gain, value) if gain > 0.0 else BestPin(0.0, 0.0, value)


def longest_pin(forecast: Forecast, stake: Stake, limit_s: float) -> float:
    """Return the longest TTL of `limit_s` and EDGES below it that costs no more than it saves.

    0 if there is none.
    """
    if stake.gain(forecast, limit_s) >= 0.0:
        return limit_s
    num_edges = bisect_left(EDGES, limit_s)
    saved = stake.saved(forecast.row[:num_edges])
    pays = (saved >= stake.cost * forecast.held_row[:num_edges]).nonzero()[0]
    return EDGES[int(pays[-1])] if len(pays) else 0.0
