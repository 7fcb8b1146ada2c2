"""Continuum's rule, as its paper has it (arXiv:2511.02230, sections 4.1, 4.2, Algorithm 1).

Equation 2: the TTL is argmax over tau of P(tau, f) * (T * eta + PrefillReload(r)) - tau, over
tau = 0 and the recorded durations of tool f. All terms are in seconds; the turn's
room, MemUsage(r) / M, is common to benefit and cost and cancels.

- P is the empirical CDF of tool f where more than K of its calls are known, that of all tools
  where more than K calls are known at all.
- PrefillReload is the time to load where there is a tier, to compute again where there is none
  ("depending on whether CPU offloading is turned on"), whichever of the two were faster.
- With at most K calls known it is T_default, "derived from the same cost model" with durations
  ~ Exp(1) and eta = 1. With R = T + PrefillReload: d/dtau [(1 - e^-tau) * R - tau] is
  R * e^-tau - 1, so T_default = ln R where R > 1 s, and 0 below. The paper calls it fixed but
  gives no number; R differs per turn and T is 0 at first, so we take the formula. The 2 s of
  the released code are this optimum for one R, e^2 = 7.4 s.

Where there is a tier, a turn whose TTL is 0 is offloaded and a pinned one stored meanwhile, because
the paper runs beside LMCache, which stores every turn. The rest of Algorithm 1 is elsewhere:
the queue's order and the pin that waits for its program's turn in scheduler/, the gaps in costs/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    Unpriced,
    must_free,
)

K = 100  # calls; so many or fewer do not make an empirical CDF (section 4.2)


class Continuum(Unpriced):
    """Pin for the TTL of Equation 2; `max_ttl_s` bounds the candidates.

    The paper knows no hints but the last step, so a client's `ttl_s` has no effect here.
    """

    name = "continuum"
    orders = True
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        ttl_s, gain, why = self._ttl(turn, snapshot)
        share = turn.num_blocks / max(snapshot.mean_blocks, 1.0)
        rest = "offload" if snapshot.has_tier else "free"
        values = {"pin": share * gain, rest: 0.0}
        if not ttl_s:
            return Choice(Offload() if snapshot.has_tier else Free(), why, values)
        then = After.STORE if snapshot.has_tier else After.DROP
        return Choice(Pin(ttl_s, then), why, values)

    def _ttl(self, turn: FinishedTurn, snapshot: Snapshot) -> tuple[float, float, str]:
        """The TTL, the seconds that it gains per average turn's room, and why."""
        reload_s = turn.load_s if math.isfinite(turn.load_s) else turn.prefill_s
        if len(turn.all_gaps) <= K:
            reward = snapshot.queueing_s + reload_s
            ttl_s = min(default_ttl(reward), self._max_ttl_s)
            gain = (1.0 - math.exp(-ttl_s)) * reward - ttl_s
            known = f"cold start, {len(turn.all_gaps)} tool calls known"
        else:
            reward = snapshot.queueing_s * snapshot.eta + reload_s
            is_own = len(turn.tool_gaps) > K
            gaps = turn.tool_gaps if is_own else turn.all_gaps
            ttl_s, gain = best_ttl(gaps, reward, self._max_ttl_s)
            known = f"{len(gaps)} calls of {'this tool' if is_own else 'any tool'} known"
        return ttl_s, gain, f"{known}, {reward:.3g} s saved by a return in time: TTL {ttl_s:.3g} s"


def default_ttl(reward: float) -> float:
    """The best TTL in seconds for a gap ~ Exp(1 s) when a return in time saves `reward` seconds."""
    return math.log(reward) if reward > 1.0 else 0.0


def best_ttl(gaps: Sequence[float], reward: float, max_ttl_s: float) -> tuple[float, float]:
    """Solve Equation 2 over `gaps`, ascending; return the TTL and its gain, in seconds.

    Of two TTLs that gain the same, the shorter wins. Stops where even a certain return would not
    pay any more, so the time grows with the number of gaps shorter than `reward`.
    """
    best, best_gain = 0.0, 0.0
    for num_back, gap in enumerate(gaps, 1):
        if gap > max_ttl_s or reward - gap <= best_gain:
            break
        gain = num_back / len(gaps) * reward - gap
        if gain > best_gain:
            best, best_gain = gap, gain
    return best, best_gain
