"""Policies by name (MAKERS), and those to compare with: stock vLLM, LMCache's rule, Continuum's
released code and the rule of its paper.

Stock keeps nothing beyond what vLLM's own prefix cache keeps.

FixedTtl pins every turn that is not the last for the same time, whatever it calls.

Released: Continuum's released code, which is simpler than its paper (section 4): a turn without a
tool call is freed, and so is one whose tool took more than 2 s on average so far; every other is
pinned for 2 s, a tool's first call among them. It averages all calls of a tool since it began, we
the last 1,000; it reads calls from ```bash blocks alone, where we take any call that is known.
Where there is a tier, a turn without a pin is offloaded, as with the paper's rule (Continuum).

LruOffload is what LMCache does: every turn goes to DRAM, nothing is pinned, no order. LMCache knows
no programs, so it stores whatever was computed, including a program's last turn and the turn of a
client that went away. The least recently used blocks leave DRAM first.

ProgramOrder keeps nothing, but serves waiting turns by the arrival of their programs. That is the
larger part of what Continuum gains (its section 4.3), so what retention adds is measured against
this policy, not against stock vLLM.

Continuum's rule, as its paper has it (arXiv:2511.02230, sections 4.1, 4.2, Algorithm 1):

Equation 2: the TTL is argmax over tau of P(tau, f) * (T * eta + PrefillReload(r)) - tau, over
tau = 0 and the recorded durations of tool f. All terms are in seconds; the turn's room,
MemUsage(r) / M, is common to benefit and cost and cancels.

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
the queue's order and the pin that waits for its program's turn in scheduler/, the gaps in
forecast.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from msgspec.structs import replace

from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    RetentionPolicy,
    Snapshot,
    must_free,
)


def _pinned(ttl_s: float, snapshot: Snapshot, why: str) -> Choice:
    """A pin of `ttl_s`, none for 0. Where there is a tier, the turn is stored in either case."""
    if ttl_s:
        return Choice(Pin(ttl_s, After.STORE if snapshot.has_tier else After.DROP), why)
    return Choice(Offload() if snapshot.has_tier else Free(), why)


class Stock(RetentionPolicy):
    """Free every turn and leave vLLM's order: what a server without us does."""

    why = "policy is stock"
    orders = False
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        return Choice(Free(), self.why)


class FixedTtl(RetentionPolicy):
    """Pin for `ttl_s`, or for what the client asked for, but never above `max_ttl_s`."""

    orders = True
    reads = False

    def __init__(self, ttl_s: float, max_ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        asked = turn.hints.ttl_s
        ttl_s = min(self._ttl_s if asked is None else asked, self._max_ttl_s)
        why = "fixed TTL" if asked is None else f"client asked for {asked:g} s"
        return _pinned(ttl_s, snapshot, why if ttl_s else "a TTL of 0 s")


RELEASED_S = 2.0  # both the slowest mean that is pinned and the pin's TTL


class Released(RetentionPolicy):
    """Pin for 2 s, never above `max_ttl_s`, after calls of a tool that takes no longer on average.

    The released code knows no hints but the last step, so a client's `ttl_s` has no effect here.
    """

    orders = True
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._ttl_s = min(RELEASED_S, max_ttl_s)

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        ttl_s, why = self._ttl(turn)
        return _pinned(ttl_s, snapshot, why)

    def _ttl(self, turn: FinishedTurn) -> tuple[float, str]:
        if not turn.asked.tools:
            return 0.0, "no tool call"
        if not turn.tool_gaps:
            return self._ttl_s, "this tool's first call"
        mean_s = fmean(turn.tool_gaps)
        why = f"this tool takes {mean_s:.3g} s on average"
        return (self._ttl_s if mean_s <= RELEASED_S else 0.0), why


class LruOffload(RetentionPolicy):
    """Store every turn that has a full block; without a tier, free it."""

    orders = False
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if not turn.num_blocks:
            return Choice(Free(), "no full block to keep")
        if not snapshot.has_tier:
            return Choice(Free(), "there is no DRAM tier")
        return Choice(Offload(), "policy is lru_offload")


class ProgramOrder(Stock):
    """Free every turn; only the order of the waiting ones differs from stock vLLM."""

    why = "policy is program_order"
    orders = True


K = 100  # calls; so many or fewer do not make an empirical CDF (section 4.2)


class Continuum(RetentionPolicy):
    """Pin for the TTL of Equation 2; `max_ttl_s` bounds the candidates.

    The paper knows no hints but the last step, so a client's `ttl_s` has no effect here.
    """

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
        return replace(_pinned(ttl_s, snapshot, why), prices={"pin": share * gain, rest: 0.0})

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


# Name -> maker from (ttl_s, max_ttl_s).
MAKERS: dict[str, Callable[[float, float], RetentionPolicy]] = {
    "adaptive": lambda _, max_ttl_s: Adaptive(max_ttl_s),
    "continuum": lambda _, max_ttl_s: Continuum(max_ttl_s),
    "fixed_ttl": FixedTtl,
    "released": lambda _, max_ttl_s: Released(max_ttl_s),
    "lru_offload": lambda *_: LruOffload(),
    "program_order": lambda *_: ProgramOrder(),
    "stock": lambda *_: Stock(),
}


def make_policy(name: str, ttl_s: float, max_ttl_s: float) -> RetentionPolicy:
    """Return the policy of that name. Raises KeyError if there is none; the config checks that."""
    return MAKERS[name](ttl_s, max_ttl_s)
