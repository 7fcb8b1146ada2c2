"""Hindsight: what a decision was worth once its program's return is known, and what was best.

Worth is net seconds that all programs together gain, by the costs and prices known at the
decision, with the formulas of policy/adaptive.py and certainty instead of chances:

    free            0
    offload         k * max(0, N * prefill - load)   if back while DRAM has it, else 0
    pin of TTL t    k * N * prefill - price * blocks * gap                 if back within t
                    -price * blocks * t, plus the offload it was a part of, if not
    the best pin    the one whose TTL is the gap

k = blocks / mean blocks of a turn, N = turns that a prefill delays. Regret = worth of the best -
worth of the chosen, never negative. A decision is not blamed for what pressure did to its pin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum_connector.tools.analysis.source import Record, count, number, part, text


@dataclass(frozen=True)
class Stakes:
    """What was at stake at a decision, in seconds. `prefill_s`: what it costs all turns together to
    compute the KV again. `load_s`: what a load costs them, with those that wait behind it; None
    without a DRAM tier, or if the tier refused."""

    decision: str
    is_stored: bool
    ttl_s: float
    weight: float
    cost: float
    prefill_s: float
    load_s: float | None
    residence_s: float

    @classmethod
    def of(cls, record: Record) -> Stakes | None:
        """The stakes in a `decision` record; None if it does not say what they were.

        One with a prefill of 0 s, or from a prior, does not say so either: none had been measured.
        """
        known, decision = part(record, "known"), text(record, "decision")
        prefill_s = number(known, "prefill")
        if known.get("prior") is True:
            return None
        if not prefill_s or decision not in ("pin", "offload", "free"):
            return None
        blocks, mean = count(record, "blocks"), max(number(known, "mean_blocks") or 1.0, 1.0)
        num_delayed = 1 + count(known, "waiting") + count(known, "running")
        load_s = None if known.get("dram_refused") else number(known, "load")
        residence_s = number(known, "residence")
        return cls(
            decision=decision,
            is_stored=decision == "offload" or text(record, "then") == "store",
            ttl_s=number(record, "ttl_s") or 0.0,
            weight=blocks / mean,
            cost=(number(known, "price") or 0.0) * blocks,
            prefill_s=num_delayed * prefill_s,
            load_s=None if load_s is None else load_s + (number(known, "behind") or 0.0),
            residence_s=math.inf if residence_s is None else residence_s,
        )

    def regret(self, gap_s: float | None) -> tuple[float, str]:
        """Seconds lost, and against what, if the program returned after `gap_s` seconds; None: it
        never did."""
        gap = math.inf if gap_s is None else gap_s
        stored, is_late = 0.0, gap > self.residence_s or math.isinf(gap)
        if self.load_s is not None and not is_late:
            stored = self.weight * max(0.0, self.prefill_s - self.load_s)
        values = {"free": 0.0, "offload": stored, "pin": self._pinned(gap, gap, stored)}
        best = max(values, key=lambda name: values[name])
        chosen = values[self.decision]
        if self.decision == "pin":
            chosen = self._pinned(gap, self.ttl_s, stored)
        # Rounded or altered numbers in the record must not make it negative.
        return max(0.0, values[best] - chosen), best

    def _pinned(self, gap: float, ttl_s: float, stored: float) -> float:
        if math.isinf(gap) and math.isinf(ttl_s):
            return -math.inf  # an endless pin for nobody
        if gap <= ttl_s:
            return self.weight * self.prefill_s - self.cost * gap
        return (stored if self.is_stored else 0.0) - self.cost * ttl_s
