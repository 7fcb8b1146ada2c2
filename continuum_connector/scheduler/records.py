"""Records: reports what happened in metrics, in the trace, and to the client. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from continuum_connector.observe.account import Account
from continuum_connector.policy.base import (
    Choice,
    FinishedTurn,
    Pin,
    Receipt,
    Snapshot,
    name_of,
)
from continuum_connector.scheduler.against_stock import UnknownStock
from continuum_connector.scheduler.away import Away
from continuum_connector.scheduler.outcomes import Outcomes
from continuum_connector.scheduler.pins import LivePin, PinEnd
from continuum_connector.scheduler.tiers.transfers import Transfer
from continuum_connector.scheduler.turns import Turn


class Records:
    """One method per event; `trace` gathers nothing while it is off. `stock`: what stock vLLM would
    have kept, to report beside what we found."""

    def __init__(self, account: Account, trace: Any, away: Away, stock: UnknownStock) -> None:
        self.account = account
        self.trace = trace
        self.stock = stock
        self.outcomes = Outcomes(account, trace, away)

    def arrived(
        self, request: Any, turn: Turn, returns: bool, gap_s: float | None, now: float
    ) -> None:
        self.account.count("turns", label=turn.identity.source.value)
        if turn.diverged is not None:
            self.account.count("diverged_turns")
        self.outcomes.arrived(turn, returns, now)
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
        self._count_against_stock(turn)
        if self.trace.enabled:
            self.trace.record(
                "admit",
                now,
                program=turn.program.key,
                turn=turn.number,
                waited_s=now - turn.arrival,
                tokens=request.num_tokens,
                hit_tokens=turn.hit_tokens,
                **_of_stock(turn),
                **_from_below(turn),
            )
        self.outcomes.admitted(turn, request.num_prompt_tokens, now)

    def _count_against_stock(self, turn: Turn) -> None:
        against = turn.against_stock
        if against is None:
            num_found = sum(turn.hit_tokens.values())
            self.account.count("tokens_against_stock", num_found, "unknown")
            return
        for kept, num_tokens in against.as_dict().items():
            if num_tokens:
                self.account.count("tokens_against_stock", num_tokens, kept)

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
        self.outcomes.decided(turn, finished, snapshot, choice, now)

    def happened(self, event: str, now: float, turn: Turn | None = None, **fields: Any) -> None:
        """Record an event that only the trace reports."""
        if turn is not None:
            fields = {"program": turn.program.key, "turn": turn.number, **fields}
        self.trace.record(event, now, **fields)

    def pin_began(self) -> None:
        self.account.count("pins_started")

    def pin_ended(self, pin: LivePin, cause: PinEnd, now: float) -> None:
        self.outcomes.pin_ended(pin, cause, now)
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
            self.outcomes.close(now, "switched_off")
        self.account.gauge("switched_on", float(is_on))
        self.trace.record("switch", now, on=is_on)

    def close(self, now: float) -> None:
        """The server stops: report what is still open, then nothing more. Idempotent."""
        self.outcomes.close(now)
        self.trace.record("stop", now)
        self.trace.close()


def answer(turn: Turn, choice: Choice) -> dict[str, Any]:
    """What a non-streamed response carries in `kv_transfer_params`, if `echo` is on."""
    decision = choice.decision
    body: dict[str, Any] = {
        "program": turn.program.key,
        "turn": turn.number,
        "decision": name_of(decision),
        "ttl_s": decision.ttl_s if isinstance(decision, Pin) else 0.0,
        "cached_tokens": turn.hit_tokens,
        **_of_stock(turn),
        **_from_below(turn),
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


def _from_below(turn: Turn) -> dict[str, Any]:
    return {} if turn.below is None else turn.below.as_dict()


def _of_divergence(turn: Turn) -> dict[str, Any]:
    return {} if turn.diverged is None else {"diverged": turn.diverged.as_dict()}


def _of_stock(turn: Turn) -> dict[str, Any]:
    """Who kept its tokens, where anybody knows; a turn that never ran looked for none."""
    against = turn.against_stock
    return {} if against is None else {"against_stock": against.as_dict()}


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
    }
