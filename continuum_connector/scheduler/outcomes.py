"""Outcomes: what came of each decision, once it is known. Decides nothing.

A decision stays open until its program's next turn is admitted, which shows what was kept
and what was lost, or until we no longer expect that turn. Each decision closes exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from continuum_connector.forecast.forecast import came_true
from continuum_connector.observe.account import Account
from continuum_connector.observe.metric_table import CHANCES
from continuum_connector.policy.base import Choice, FinishedTurn, Free, Pin, Snapshot, name_of
from continuum_connector.programs.program import OVER_S
from continuum_connector.scheduler.against_stock import AgainstStock
from continuum_connector.scheduler.away import Absence, Away, OpenDecision
from continuum_connector.scheduler.pins import LivePin, PinEnd
from continuum_connector.scheduler.turns import Turn

# What a pin's end means for the turn that returns to it.
_OF_PIN_END = {
    PinEnd.EXPIRED: "expired",
    PinEnd.PRESSURE: "pressure",
    PinEnd.RESET: "reset",
}


@dataclass(frozen=True)
class FoundTokens:
    """Where the tokens of a finished turn were when its program's next turn was admitted."""

    by_memory: dict[str, int]  # nearest first
    recomputed: int
    against_stock: AgainstStock | None = None  # by who kept them; None if nobody knows

    @classmethod
    def of(cls, kept: int, turn: Turn, num_prompt_tokens: int) -> FoundTokens:
        """Divide the tokens that the prompt can share with the `kept` ones by where they were."""
        shared = left = min(kept, num_prompt_tokens)
        found = {}
        for memory, num_tokens in turn.hit_tokens.items():
            found[memory] = min(num_tokens, left)
            left -= found[memory]
        against = None
        if turn.stock_tokens is not None:
            against = AgainstStock.of(shared - left, min(shared, turn.stock_tokens))
        return cls(found, left, against)

    @property
    def most(self) -> str:
        """Where most of the tokens were; in a tie, the slower place."""
        memory = max(reversed(self.by_memory), key=self.by_memory.__getitem__)
        return f"in_{memory}" if self.by_memory[memory] > self.recomputed else "recomputed"


class Outcomes:
    """Microseconds per call. `len`: how many decisions are open."""

    def __init__(self, account: Account, trace: Any, away: Away) -> None:
        self._account = account
        self._trace = trace
        self._away = away

    def __len__(self) -> int:
        return len(self._away.decisions())

    # --- what happened ----------------------------------------------------------------
    def decided(
        self, turn: Turn, finished: FinishedTurn, snapshot: Snapshot, choice: Choice, now: float
    ) -> None:
        """A turn is done. If an older decision of its program is still open, the program's turns
        overlap; the next turn shows the outcome of the newest decision."""
        one = _opened(turn, finished, snapshot, choice, now)
        is_over = isinstance(choice.decision, Free) and (finished.aborted or finished.is_last)
        older = self._away.decision_of(finished.program)
        if older is not None:
            older.back.pop(turn, None)  # if it is in, its client went away before it was admitted
            if not is_over:
                self._close(older, "superseded", now)
            elif finished.hints.final and not (turn.is_stray or older.has_pin):
                # Otherwise its pin's end or its program's next turn shows the outcome.
                self._close(older, "never", now)
        if is_over:
            self._tell(one, "done", now)
            return
        forgotten = self._away.decided(turn.program, one, now)
        if forgotten is not None:
            self._tell(forgotten, "never", now)

    def arrived(self, turn: Turn, fits: bool, now: float) -> None:
        """A turn arrived; `fits`: its program's pin waits for it."""
        one = self._away.decision_of(turn.program.key)
        if one is None or turn.is_stray:
            return
        one.came_back(turn, fits, now)

    def admitted(self, turn: Turn, num_prompt_tokens: int, now: float) -> None:
        """A turn runs: if it came after an open decision, that decision's outcome is known."""
        one = self._away.decision_of(turn.program.key)
        if one is not None and turn in one.back:
            found = FoundTokens.of(one.kept_tokens, turn, num_prompt_tokens)
            self._close(one, _outcome(one, turn, found), now, found, turn)

    def pin_ended(self, pin: LivePin, cause: PinEnd, now: float) -> None:
        """A pin ended; the next turn, if it comes, shows what that means.

        A superseded pin belongs to an older decision, which is closed by now, and so may any other.
        """
        one = self._away.decision_of(pin.program)
        is_its = one is not None and one.has_pin and one.decided == pin.started
        if one is None or not is_its or cause is PinEnd.SUPERSEDED:
            return
        one.pin_ended(cause)
        if cause is PinEnd.PROGRAM_DONE:
            self._close(one, "never", now)

    def silent(self, absence: Absence, now: float) -> None:
        """The program is not expected back: close its decision, unless a turn waits or the pin
        lives."""
        one = absence.decision
        if one is not None and not (one.back or one.has_pin):
            self._close(one, "never", now)

    def close(self, now: float, outcome: str = "never") -> None:
        """Close all open decisions. Either the server stops, and programs that are away never
        return, or the connector is switched off, and nobody sees which programs return."""
        for one in self._away.decisions():
            self._close(one, outcome, now)

    # --- parts ------------------------------------------------------------------------
    def _close(
        self,
        one: OpenDecision,
        outcome: str,
        now: float,
        found: FoundTokens | None = None,
        to: Any = None,
    ) -> None:
        self._away.close(one.program)
        self._tell(one, outcome, now, found, to)

    def _tell(
        self,
        one: OpenDecision,
        outcome: str,
        now: float,
        found: FoundTokens | None = None,
        turn: Turn | None = None,
    ) -> None:
        self._account.count("outcomes", label=f"{one.decision}_{outcome}")
        self._judge(one, outcome, now)
        if not self._trace.enabled:
            return
        fields = {} if found is None else _found(one, found)
        self._trace.record(
            "outcome",
            now,
            program=one.program,
            turn=one.turn,
            decision=one.decision,
            outcome=outcome,
            next_turn=None if turn is None else turn.number,
            gap_s=one.gap_s,
            open_s=now - one.decided,
            horizon_s=one.horizon_s,
            p=one.p,
            kept_tokens=one.kept_tokens,
            **fields,
        )

    def _judge(self, one: OpenDecision, outcome: str, now: float) -> None:
        """Count the forecast, if it is known whether it came true. A program that was over at once
        had none to judge: it is not expected back."""
        if outcome == "done":
            return
        watched_s = 0.0 if outcome == "superseded" else now - one.decided
        is_true = came_true(one.gap_s, watched_s, one.horizon_s)
        if is_true is None:
            return
        chance = CHANCES[min(int(one.p * len(CHANCES)), len(CHANCES) - 1)]
        self._account.count("forecasts", label=chance)
        self._account.count("forecasts_true", int(is_true), label=chance)


def _outcome(one: OpenDecision, turn: Turn, found: FoundTokens) -> str:
    """The outcome, now that the next turn runs."""
    if one.decision != "pin":
        return found.most
    fits = one.back[turn]
    if fits is False:
        return "diverged"
    return "in_time" if one.pin_end is None else _OF_PIN_END.get(one.pin_end, "in_time")


def _opened(
    turn: Turn, finished: FinishedTurn, snapshot: Snapshot, choice: Choice, now: float
) -> OpenDecision:
    decision = choice.decision
    # The time within which a returning turn finds what we decided to keep. Whether a forecast of a
    # later return comes true is known too late to judge it.
    horizon_s = decision.ttl_s if isinstance(decision, Pin) else min(snapshot.residence_s, OVER_S)
    return OpenDecision(
        program=finished.program,
        turn=finished.turn,
        num_tokens=finished.num_tokens,
        prefill_s=finished.prefill_s,
        load_s=finished.load_s,
        p=finished.gap.within(horizon_s),
        decision=name_of(decision),
        kept_tokens=turn.program.kept.num_tokens,
        decided=now,
        horizon_s=horizon_s,
    )


def _found(one: OpenDecision, found: FoundTokens) -> dict[str, Any]:
    """Tokens by memory and by who kept them; seconds saved and lost, by the decision's estimates.
    Each token is taken to cost the same. What stock vLLM would have found is not saved; what only
    stock would have found counts against us."""
    prefill_s = one.prefill_s / max(one.kept_tokens, 1)
    num_found = sum(found.by_memory.values())
    num_loaded = num_found - found.by_memory["vram"]
    load_s = one.load_s / max(one.kept_tokens, 1) if num_loaded else 0.0
    told: dict[str, Any] = {
        "hit_tokens": found.by_memory,
        "recomputed_tokens": found.recomputed,
        "lost_s": found.recomputed * prefill_s,
    }
    if (against := found.against_stock) is not None:
        num_gained = against.only_ours - against.only_stock
        told["against_stock"] = against.as_dict()
        told["saved_s"] = num_gained * prefill_s - num_loaded * load_s
    return told
