"""Records: reports what happened in metrics, in the trace, and to the client. Decides nothing.

Outcomes are what came of each decision, once it is known. A decision stays open until its program's
next turn is admitted, which shows what was kept and what was lost, or until we no longer expect
that turn. Each decision closes exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from continuum_connector.forecast import came_true
from continuum_connector.observe.account import CHANCES, Account
from continuum_connector.policy.base import (
    Choice,
    FinishedTurn,
    Free,
    Pin,
    Receipt,
    Snapshot,
    name_of,
)
from continuum_connector.programs.program import OVER_S
from continuum_connector.scheduler.tiers.traffic import Transfer
from continuum_connector.scheduler.turns import (
    Absence,
    AgainstStock,
    Away,
    LivePin,
    OpenDecision,
    PinEnd,
    Turn,
)


class Records:
    """One method per event; `trace` gathers nothing while it is off."""

    def __init__(self, account: Account, trace: Any, away: Away) -> None:
        self.account = account
        self.trace = trace
        self._away = away

    def arrived(
        self, request: Any, turn: Turn, returns: bool, gap_s: float | None, now: float
    ) -> None:
        self.account.count("turns", label=turn.identity.source.value)
        if turn.diverged is not None:
            self.account.count("diverged_turns")
        one = self._away.decision_of(turn.program.key)
        if one is not None and not turn.is_stray:
            one.came_back(turn, returns, now)
        if not self.trace.enabled:
            return
        self.trace.record(
            "return" if returns else "arrive",
            now,
            program=turn.program.key,
            source=turn.identity.source.value,
            turn=turn.number,
            request=request.request_id,
            tokens=request.num_tokens,
            gap_s=gap_s,
            **_of_divergence(turn),
        )

    def admitted(self, request: Any, turn: Turn, now: float) -> None:
        self.account.count("prompt_tokens", request.num_prompt_tokens)
        for memory, num_tokens in turn.hit_tokens.items():
            if num_tokens:
                self.account.count("hit_tokens", num_tokens, memory)
        against, unknown = turn.against_stock, {"unknown": turn.num_found}
        for kept, num_tokens in (unknown if against is None else against.as_dict()).items():
            if num_tokens:
                self.account.count("tokens_against_stock", num_tokens, kept)
        if self.trace.enabled:
            self.trace.record(
                "admit",
                now,
                program=turn.program.key,
                turn=turn.number,
                waited_s=now - turn.arrival,
                tokens=request.num_tokens,
                hit_tokens=turn.hit_tokens,
                **_of_stock_and_below(turn),
            )
        one = self._away.decision_of(turn.program.key)
        if one is not None and turn in one.back:  # its outcome is known
            found = FoundTokens.of(one.kept_tokens, turn, request.num_prompt_tokens)
            self._close(one, _outcome(one, turn, found), now, found)

    def decided(
        self, turn: Turn, finished: FinishedTurn, snapshot: Snapshot, choice: Choice, now: float
    ) -> None:
        decision = choice.decision
        self.account.count("decisions", label=name_of(decision))
        self.account.count("endings", label=finished.asked.ending.value)
        for receipt in choice.receipts:
            self.account.count("hints", label=receipt.outcome.value)
        if self.trace.enabled:
            ttl_s, then = None, None
            if isinstance(decision, Pin):
                ttl_s, then = decision.ttl_s, decision.then.value
            self.trace.record(
                "decision",
                now,
                program=finished.program,
                turn=finished.turn,
                decision=name_of(decision),
                why=choice.why,
                ttl_s=ttl_s,
                then=then,
                blocks=finished.num_blocks,
                tokens=finished.num_tokens,
                aborted=finished.aborted,
                values=dict(choice.values),
                known=_known(finished, snapshot, ttl_s),
                hints=_told(choice.receipts),
            )
        self._open(turn, finished, snapshot, choice, now)

    def happened(self, event: str, now: float, turn: Turn | None = None, **fields: Any) -> None:
        """Record an event that only the trace reports."""
        if turn is not None:
            fields = {"program": turn.program.key, "turn": turn.number, **fields}
        self.trace.record(event, now, **fields)

    def pin_began(self) -> None:
        self.account.count("pins_started")

    def pin_ended(self, pin: LivePin, cause: PinEnd, now: float) -> None:
        self._note_pin_end(pin, cause, now)
        self.account.count("pins_ended", label=cause.value)
        self.account.observe("pin_seconds", now - pin.started)
        if self.trace.enabled:
            self.trace.record(
                "pin_end",
                now,
                program=pin.program,
                cause=cause.value,
                held_s=now - pin.started,
                blocks=len(pin.blocks),
            )

    def settled(self, transfer: Transfer, now: float) -> None:
        if not self.trace.enabled:
            return
        outcome = transfer.outcome
        self.trace.record(
            transfer.kind.value,
            now,
            program=transfer.program,
            transfer=transfer.id,
            blocks=len(transfer),
            outcome=transfer.state.value,
            reasons=sorted(set(outcome.reasons)) if outcome is not None else [],
            seconds=now - transfer.admitted,
        )

    def count_lost(self) -> None:
        """The trace writer fell behind: say how many records it dropped."""
        dropped = self.trace.take_dropped()
        if dropped:
            self.account.count("trace_dropped", dropped)

    def switched(self, is_on: bool, now: float) -> None:
        """An operator switched us on or off."""
        if not is_on:
            self._close_all(now, "switched_off")
        self.account.gauge("switched_on", float(is_on))
        self.trace.record("switch", now, on=is_on)

    def close(self, now: float) -> None:
        """The server stops: report what is still open, then nothing more. Idempotent."""
        self._close_all(now, "never")
        self.trace.record("stop", now)
        self.trace.close()

    def silent(self, absence: Absence, now: float) -> None:
        """The program is not expected back: close its decision, unless a turn waits or the pin
        lives."""
        one = absence.decision
        if one is not None and not (one.back or one.has_pin):
            self._close(one, "never", now)

    # --- outcomes ---------------------------------------------------------------------
    def _open(
        self, turn: Turn, finished: FinishedTurn, snapshot: Snapshot, choice: Choice, now: float
    ) -> None:
        """A turn is done. If an older decision of its program is still open, the program's turns
        overlap; the next turn shows the outcome of the newest decision."""
        decision = choice.decision
        # The time within which a returning turn finds what we decided to keep. Whether a forecast
        # of a later return comes true is known too late to judge it.
        kept_s = min(snapshot.residence_s, OVER_S)
        horizon_s = decision.ttl_s if isinstance(decision, Pin) else kept_s
        one = OpenDecision(
            program=finished.program,
            turn=finished.turn,
            prefill_s=finished.prefill_s,
            load_s=finished.load_s,
            p=finished.gap.within(horizon_s),
            decision=name_of(decision),
            kept_tokens=turn.program.kept.num_tokens,
            decided=now,
            horizon_s=horizon_s,
        )
        is_over = isinstance(decision, Free) and (finished.aborted or finished.is_last)
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

    def _note_pin_end(self, pin: LivePin, cause: PinEnd, now: float) -> None:
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

    def _close_all(self, now: float, outcome: str) -> None:
        """Close all open decisions. Either the server stops, and programs that are away never
        return, or the connector is switched off, and nobody sees which programs return."""
        for one in self._away.decisions():
            self._close(one, outcome, now)

    def _close(
        self, one: OpenDecision, outcome: str, now: float, found: FoundTokens | None = None
    ) -> None:
        self._away.close(one.program)
        self._tell(one, outcome, now, found)

    def _tell(
        self, one: OpenDecision, outcome: str, now: float, found: FoundTokens | None = None
    ) -> None:
        self.account.count("outcomes", label=f"{one.decision}_{outcome}")
        self._judge(one, outcome, now)
        if not self.trace.enabled:
            return
        fields = {} if found is None else _found(one, found)
        self.trace.record(
            "outcome",
            now,
            program=one.program,
            turn=one.turn,
            decision=one.decision,
            outcome=outcome,
            next_turn=None if found is None else found.turn,
            gap_s=one.gap_s,
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
        self.account.count("forecasts", label=chance)
        self.account.count("forecasts_true", int(is_true), label=chance)


def answer(turn: Turn, choice: Choice) -> dict[str, Any]:
    """What a non-streamed response carries in `kv_transfer_params`, if `echo` is on."""
    decision = choice.decision
    body: dict[str, Any] = {
        "program": turn.program.key,
        "turn": turn.number,
        "decision": name_of(decision),
        "ttl_s": decision.ttl_s if isinstance(decision, Pin) else 0.0,
        "cached_tokens": turn.hit_tokens,
        **_of_stock_and_below(turn),
        **_of_divergence(turn),
    }
    if turn.held_s:
        body["held_s"] = turn.held_s
    if choice.receipts:
        body["hints"] = _told(choice.receipts)
    return {"continuum": body}


def _told(receipts: Sequence[Receipt]) -> list[dict[str, Any]]:
    """Receipts as JSON; fields that do not apply are left out."""
    told = []
    for receipt in receipts:
        fields = {
            "hint": receipt.hint,
            "outcome": receipt.outcome.value,
            "why": receipt.why or None,
            "until_s": receipt.until_s,
            "value": receipt.value,
        }
        told.append({name: value for name, value in fields.items() if value is not None})
    return told


def _of_divergence(turn: Turn) -> dict[str, Any]:
    return {} if turn.diverged is None else {"diverged": turn.diverged.as_dict()}


def _of_stock_and_below(turn: Turn) -> dict[str, Any]:
    """Who kept its tokens, where anybody knows; a turn that never ran looked for none. What a
    memory below DRAM had for it."""
    against = turn.against_stock
    told = {} if against is None else {"against_stock": against.as_dict()}
    return told if turn.below is None else {**told, **turn.below.as_dict()}


def _known(finished: FinishedTurn, snapshot: Snapshot, ttl_s: float | None) -> dict[str, Any]:
    """What the decision was based on, for the trace; seconds unless said otherwise."""
    gap, asked = finished.gap, finished.asked
    return {
        "ending": asked.ending.value,
        "tools": list(asked.tools),
        "gap_p50": gap.quantile(0.5),
        "gap_p90": gap.quantile(0.9),
        "gaps_seen": gap.num_seen,
        "p_in_time": gap.within(ttl_s) if ttl_s is not None else None,
        "prefill": finished.prefill_s,
        "prior": finished.is_prior,
        "load": finished.load_s,
        "behind": finished.bus_s * snapshot.num_at_bus,
        "queueing": snapshot.queueing_s,
        "eta": snapshot.eta,
        "price": snapshot.price,
        "mean_blocks": snapshot.mean_blocks,
        "free_blocks": snapshot.num_free_blocks,
        "pinned_blocks": snapshot.num_pinned_blocks,
        "waiting": snapshot.num_waiting,
        "running": snapshot.num_running,
        "vram_blocks": snapshot.num_blocks,
        "residence": snapshot.residence_s,
        "dram_refused": not snapshot.takes_store,
        "pins_lose": snapshot.pins_lose,
    }


# What a pin's end means for the turn that returns to it.
_OF_PIN_END = {
    PinEnd.EXPIRED: "expired",
    PinEnd.PRESSURE: "pressure",
    PinEnd.LOSES: "pressure",  # given up for others as well
    PinEnd.RESET: "reset",
}


@dataclass(frozen=True)
class FoundTokens:
    """Where the tokens of a finished turn were when its program's next, `turn`, was admitted."""

    turn: int
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
        return cls(turn.number, found, left, against)

    @property
    def most(self) -> str:
        """Where most of the tokens were; in a tie, the slower place."""
        memory = max(reversed(self.by_memory), key=self.by_memory.__getitem__)
        return f"in_{memory}" if self.by_memory[memory] > self.recomputed else "recomputed"


def _outcome(one: OpenDecision, turn: Turn, found: FoundTokens) -> str:
    """The outcome, now that the next turn runs."""
    if one.decision != "pin":
        return found.most
    fits = one.back[turn]
    if fits is False:
        return "diverged"
    return "in_time" if one.pin_end is None else _OF_PIN_END.get(one.pin_end, "in_time")


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
