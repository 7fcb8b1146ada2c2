"""Traffic: every copy between VRAM and the tiers, whichever tier's it is.

It holds the VRAM blocks of stores until they settle, cancels what takes too long, finds what hangs
even then, and counts. Tiers begin transfers here and are told when those are over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from continuum_connector.messages import BlockIds, StepPlan, WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.holds import HoldTable
from continuum_connector.scheduler.tiers.slots import Tickets
from continuum_connector.scheduler.tiers.transfers import (
    Deadlines,
    Kind,
    Transfer,
    TransferLedger,
    TransferState,
)

# How often an engine that has nothing else to do looks whether a copy that hangs has ended.
LOOK_S = 1.0
# What a kind of transfer is counted as: those that settled, and what was copied.
_COUNTED = {Kind.STORE: ("stores", "stored"), Kind.LOAD: ("loads", "loaded")}


@dataclass(frozen=True)
class Owner:
    """A tier, as its transfers know it.

    `settled` is called once with each that is over; `hangs` with a sentence about one that does
    not end though it was cancelled.
    """

    settled: Callable[[Transfer], None]
    hangs: Callable[[str], None]


class Traffic:
    """The ledger that all tiers share, with holds, deadlines and numbers.

    `world_size`: ranks that must report each transfer; `timeout_s`: how long one may take.
    """

    def __init__(
        self, world_size: int, holds: HoldTable, account: Account, timeout_s: float
    ) -> None:
        self.world_size = world_size
        self.holds = holds
        self.ledger = TransferLedger(world_size)
        self._account = account
        self._deadlines = Deadlines(self.ledger, timeout_s)
        self._owners: dict[int, Owner] = {}  # of the transfers in flight
        self._num_in_flight = Counter(dict.fromkeys(Kind, 0))
        self._hangs = False
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self.ledger)

    @property
    def num_held(self) -> int:
        """VRAM blocks that stores under way hold."""
        return self.holds.num_blocks

    # --- tiers begin transfers ----------------------------------------------------------
    def store(
        self, owner: Owner, program: str, blocks: Sequence[Any], slots: Tickets, now: float
    ) -> Transfer:
        """Queue a store of VRAM `blocks`, pairwise into `slots`; they are held until it settles."""
        hold = self.holds.take(blocks)
        return self._admitted(owner, self.ledger.store(program, hold, slots, now))

    def load(
        self,
        owner: Owner,
        program: str,
        request_id: str,
        blocks: BlockIds,
        slots: Tickets,
        now: float,
    ) -> Transfer:
        """Queue a load into the request's VRAM `blocks`; it waits until this settles."""
        return self._admitted(owner, self.ledger.load(program, request_id, blocks, slots, now))

    def abandon_stores(self, owner: Owner, now: float) -> list[Transfer]:
        """The tier wants none of its stores any more; returns those that are over, as they had not
        left yet. The VRAM blocks of all are free at once."""
        over = []
        for transfer in self.ledger:
            if transfer.kind is not Kind.STORE or self._owners[transfer.id] is not owner:
                continue
            self._release(transfer)
            if self.ledger.abandon(transfer):
                self._settled(transfer, now)
                over.append(transfer)
        return over

    # --- every step -------------------------------------------------------------------
    def drain(self, now: float) -> StepPlan:
        """Return this step's orders for the workers; cancels what takes too long.

        Where even that does not end a copy, later ones would wait behind it, so its tier promises
        nothing more. Its request goes on waiting: it would be computed in the blocks that the copy
        may yet write to (vLLM keeps those behind a prefix hit for it).
        """
        self._looked = now
        hung = self._deadlines.step(now)
        if hung is not None:
            self._hangs = True
            self._owners[hung.id].hangs(
                f"{hung.kind.value} {hung.id} hangs: begun {now - hung.admitted:.0f} s ago, "
                "cancelled, and the driver has not ended it"
            )
        return self.ledger.drain()

    def settle(self, report: WorkerReport, now: float) -> list[Transfer]:
        """Take in which copies the workers ended; returns the transfers that are over."""
        over = self.ledger.settle(report)
        for transfer in over:
            self._settled(transfer, now)
        return over

    @property
    def next_look(self) -> float:
        """From when on an otherwise idle engine must step for the copies in flight: it is by
        steps that workers report. Once one hangs, which may be for ever, only now and then."""
        if not len(self.ledger):
            return math.inf
        return self._looked + LOOK_S if self._hangs else -math.inf

    def oldest_store_age(self, now: float) -> float | None:
        """Seconds since the oldest store that holds blocks was queued, or None if none does."""
        if not self.holds.num_blocks:
            return None
        held = (t for t in self.ledger if t.kind is Kind.STORE and t.hold)  # the oldest first
        oldest = next(held, None)
        return None if oldest is None else now - oldest.admitted

    def update_gauges(self) -> None:
        """Set what the counters are balanced with."""
        for kind, number in self._num_in_flight.items():
            self._account.gauge("transfers_in_flight", number, kind.value)

    # --- parts ------------------------------------------------------------------------
    def _admitted(self, owner: Owner, transfer: Transfer) -> Transfer:
        self._owners[transfer.id] = owner
        self._deadlines.add(transfer)
        self._num_in_flight[transfer.kind] += 1
        self._account.count("transfers_admitted", label=transfer.kind.value)
        return transfer

    def _settled(self, transfer: Transfer, now: float) -> None:
        self._owners.pop(transfer.id).settled(transfer)
        self._release(transfer)
        self._num_in_flight[transfer.kind] -= 1
        self._count(transfer, now)

    def _release(self, transfer: Transfer) -> None:
        if transfer.hold is not None:
            self.holds.release(transfer.hold)
            transfer.hold = None

    def _count(self, transfer: Transfer, now: float) -> None:
        account, outcome = self._account, transfer.outcome
        assert outcome is not None
        counted, copied = _COUNTED[transfer.kind]
        is_late = transfer.cancelled and transfer.state is TransferState.FAILED
        is_cancelled = is_late and transfer.kind is Kind.LOAD
        account.count(counted, label="cancelled" if is_cancelled else transfer.state.value)
        for reason in set(outcome.reasons):
            is_timeout = is_late and reason == "cancelled"
            account.count("transfer_failures", label="timeout" if is_timeout else reason)
        if transfer.state is TransferState.DONE:
            account.count(f"{copied}_blocks", len(transfer))
            account.count(f"{copied}_bytes", outcome.num_bytes)
            account.observe(f"{transfer.kind.value}_seconds", now - transfer.admitted)
