"""Adaptive: each alternative is priced in seconds that all programs together gain; the best wins.

    free       0
    offload    k * P(residence) * max(0, N * prefill - load)
    pin        max over tau of  k * P(tau) * N * prefill - price * blocks * H(tau)
    pin_store  offload + the same, where a return that DRAM would have served saves only
               min(N * prefill, load)

P, H: see worth.py. k = blocks / mean_blocks, how many average turns' room this one takes.
N = turns that run or wait, and the returning one: a prefill takes the GPU's time from all of
them, a load only its own turn's. A place in the queue is worth nothing here: what one program
gains by it, another loses. The price is charged as FORESEEN / mean_blocks where it is less.
docs/decisions.md has the reasons, and what follows for each kind of gap.
"""

from __future__ import annotations

import math
from dataclasses import replace

from continuum_connector.costs.forecast import Forecast
from continuum_connector.costs.price import QUIET
from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Resident,
    Snapshot,
    let_go,
)
from continuum_connector.policy.worth import BestPin, Stake, best_pin, longest_pin, soonest

# To take a hold on a block and to let go of it takes so long, and the step waits: 1.5 ms for
# 6,500 blocks (field.md 0.7). A pin that saves less is not worth its own making.
HOLD_S = 0.25e-6
# What keeping is charged at least: the share of time in which somebody will wait for the room
# while the price still says that nobody does. A tenth of what the price itself takes for quiet;
# at the price's own pace of forgetting, a server that has not seen anybody wait for 3.5 minutes.
FORESEEN = QUIET / 10
# Whoever is expected back within max_ttl_s with less is not pinned: of such pins nine in ten fill
# VRAM for nobody, and what is freed lies in vLLM's own prefix cache anyway.
MIN_P_BACK = 0.1
# A store into a full DRAM takes another program's place: more likely read than not, or none.
MIN_P_READ = 0.5
# Of two programs needed equally soon the older is worth more: 1 ms per 11 days of age.
AGE_WEIGHT = 1e-9


class Adaptive:
    """What is needed soonest stays nearest, as far as its room is not worth more to others."""

    name = "adaptive"
    orders = True
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (over := let_go(turn)) is not None:
            return over
        if turn.hints.compaction:
            return Choice(Free(), "a compaction: what comes next extends an older prefix")
        can_store = snapshot.has_tier and snapshot.takes_store
        p_read = turn.gap.within(snapshot.residence_s) if can_store else 0.0
        stored_s = _stored_s(turn, snapshot, p_read)
        stake = _stake(turn, snapshot, stored_s, p_read)
        pin = best_pin(turn.gap, stake, turn.num_blocks, self._max_ttl_s)
        ttl_s, asked_for = self._with_hint(turn, snapshot, stake, pin)
        offload = stake.weight * p_read * stored_s
        values = {"free": 0.0, "pin": pin.gain}
        if snapshot.has_tier:
            dropped = _stake(turn, snapshot, 0.0, 0.0) if stored_s else stake
            alone = best_pin(turn.gap, dropped, turn.num_blocks, self._max_ttl_s)
            values |= {"pin": alone.gain, "offload": offload, "pin_store": offload + pin.gain}
        if ttl_s:
            then = After.STORE if stored_s else After.DROP
            return Choice(
                Pin(ttl_s, then, pin.value), _why_pin(turn, stake, ttl_s, asked_for), values
            )
        if stored_s:
            return Choice(Offload(), _why_offload(turn, p_read), values)
        return Choice(Free(), self._why_free(turn, snapshot, p_read), values)

    def dram_rank(self, resident: Resident, now: float) -> float:
        """Minus the seconds until the program's blocks are used next; older programs first."""
        away_s = 0.0 if resident.is_waiting else _away_s(resident, now)
        return AGE_WEIGHT * (now - resident.arrival) - away_s - resident.queueing_s

    def aged(self, value: float, gap: Forecast, age: float) -> float:
        """The same seconds saved, for the room that one return takes at best from now on."""
        now_s = soonest(gap, age)
        return value * soonest(gap, 0.0) / now_s if now_s < math.inf else 0.0

    def _p_back(self, gap: Forecast) -> float:
        return gap.within(self._max_ttl_s)

    def _with_hint(
        self, turn: FinishedTurn, snapshot: Snapshot, stake: Stake, pin: BestPin
    ) -> tuple[float, bool]:
        """The TTL, and whether the client's word made it longer.

        A client gets what it asks for as long as that costs others no more than it saves, at
        the price of now: what it adds gives way before every other pin. 0 s asked for is no pin.
        """
        pays = pin.gain > HOLD_S * turn.num_blocks and self._p_back(turn.gap) >= MIN_P_BACK
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
        if not turn.prefill_s:
            return "what a prefill takes is not known yet"
        if not snapshot.has_tier:
            back = f"{self._p_back(turn.gap):.0%} are back within {self._max_ttl_s:g} s"
            return f"no pin pays: {back}, {turn.prefill_s:.3g} s to compute again"
        if snapshot.num_delayed * turn.prefill_s <= turn.load_s:
            return f"no pin pays; {turn.prefill_s:.3g} s to compute, {turn.load_s:.3g} s to load"
        if not snapshot.takes_store:
            return "no pin pays, and DRAM has no room for it now"
        return (
            f"no pin pays; only {p_read:.0%} are back within {snapshot.residence_s:.3g} s in DRAM"
        )


def _stored_s(turn: FinishedTurn, snapshot: Snapshot, p_read: float) -> float:
    """Seconds that a return saves by finding the blocks in DRAM; 0 if they should not go there."""
    is_full = snapshot.residence_s < math.inf
    if not p_read or (is_full and p_read < MIN_P_READ):
        return 0.0
    return max(0.0, snapshot.num_delayed * turn.prefill_s - turn.load_s)


def _stake(turn: FinishedTurn, snapshot: Snapshot, stored_s: float, p_read: float) -> Stake:
    weight = turn.num_blocks / max(snapshot.mean_blocks, 1.0)
    return Stake(
        pinned_s=snapshot.num_delayed * turn.prefill_s,
        stored_s=stored_s,
        p_stored=p_read,
        weight=weight,
        cost=max(snapshot.price * turn.num_blocks, FORESEEN * weight),
    )


def _away_s(resident: Resident, now: float) -> float:
    """Seconds until the program is back, at best; as long as it was silent, if nobody knows."""
    age = now - resident.finished if resident.finished is not None else 0.0
    seconds = soonest(resident.gap, max(age, 0.0))
    return seconds if seconds < math.inf else max(now - resident.last_used, age)


def _why_pin(turn: FinishedTurn, stake: Stake, ttl_s: float, asked_for: bool) -> str:
    p, held = turn.gap.within(ttl_s), turn.gap.held(ttl_s)
    saved = stake.gain(turn.gap, ttl_s) + stake.cost * held
    says = f"client asked for {turn.hints.ttl_s:g} s; " if asked_for else ""
    return (
        f"{says}{p:.0%} are back within {ttl_s:.3g} s, after {held:.3g} s of room on average: "
        f"saves {saved:.3g} s, costs {stake.cost * held:.3g} s"
    )


def _why_offload(turn: FinishedTurn, p_read: float) -> str:
    return (
        f"no pin pays; {p_read:.0%} are back while it is in DRAM: "
        f"{turn.load_s:.3g} s to load, {turn.prefill_s:.3g} s to compute"
    )
