"""Traffic: every copy between VRAM and the tiers or among the tiers, whichever tier it belongs to.

It holds the VRAM blocks of stores until they settle, cancels copies that take too long, finds those
that hang even then, and counts. Tiers begin transfers here and are told when they are over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from continuum_connector.messages import BlockIds, StepPlan, WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.holds import HoldTable
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.tiers.slots import Tickets
from continuum_connector.scheduler.tiers.transfers import (
    Deadlines,
    Kind,
    PlacesBelow,
    Transfer,
    TransferLedger,
    TransferState,
)

# How often an engine with nothing else to do checks whether a copy that hangs has ended; and
# whether one below DRAM has, for which no request waits. If a request waits, it steps anyway.
LOOK_S = 1.0
TIMEOUT_S = 30.0  # after which a store or a load is cancelled
BELOW_LOOK_S = 0.05
BELOW = (Kind.WRITE, Kind.READ)


@dataclass(frozen=True)
class _Names:
    """What a kind of transfer is counted as: how many settled, why they failed, what was copied, in
    bytes and in blocks if those are counted, and how long it took."""

    settled: str
    failed: str
    num_bytes: str
    seconds: str
    num_blocks: str = ""


_COUNTED = {
    Kind.STORE: _Names(
        "stores", "transfer_failures", "stored_bytes", "store_seconds", "stored_blocks"
    ),
    Kind.LOAD: _Names(
        "loads", "transfer_failures", "loaded_bytes", "load_seconds", "loaded_blocks"
    ),
    Kind.WRITE: _Names("writes", "disk_failures", "disk_written_bytes", "write_seconds"),
    Kind.READ: _Names("reads", "disk_failures", "disk_read_bytes", "read_seconds"),
}


@dataclass(frozen=True, eq=False)
class Owner:
    """A tier, as its transfers know it.

    `settled` is called once with each transfer that is over; `hangs` with a sentence about one that
    does not end although it was cancelled. `below`: the memory below DRAM that they read and write;
    "" if they copy from or to VRAM.
    """

    settled: Callable[[Transfer], None]
    hangs: Callable[[str], None]
    below: str = ""


class Traffic:
    """The ledger that all tiers share, with holds, deadlines and numbers.

    `world_size`: ranks that must report each transfer; `timeout_s`: how long one may take,
    `below_timeout_s` if it is a copy below DRAM.
    """

    def __init__(
        self,
        world_size: int,
        holds: HoldTable,
        account: Account,
        below_timeout_s: float = 0.0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.world_size = world_size
        self.holds = holds
        self.ledger = TransferLedger(world_size)
        self._account = account
        of_vram, below = (Deadlines(self.ledger, each) for each in (timeout_s, below_timeout_s))
        self._deadlines = {kind: below if kind in BELOW else of_vram for kind in Kind}
        self._all_deadlines = of_vram, below
        self._owners: dict[int, Owner] = {}  # of the transfers in flight
        self._num_in_flight = Counter(dict.fromkeys(Kind, 0))
        self._num_owned: Counter[Owner] = Counter()
        self._hung: set[Owner] = set()  # those with a transfer that hangs
        self._looked = 0.0
        self.num_load_blocks = 0  # that loads under way are to bring
        self.loads_since = 0.0  # when the first of those had the bus for itself
        self._said: dict[str, Any] = {}  # in the next plan

    def __len__(self) -> int:
        return len(self.ledger)

    @property
    def num_held(self) -> int:
        """VRAM blocks that stores under way hold."""
        return self.holds.num_blocks

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return self.num_of(Kind.LOAD)

    def num_of(self, kind: Kind) -> int:
        """Transfers of that kind under way."""
        return self._num_in_flight[kind]

    def blocks_under_way(self) -> dict[str, int]:
        """Blocks of the transfers under way, for the trace: `store_blocks` and so on."""
        found = {f"{kind.value}_blocks": 0 for kind in Kind}
        for transfer in self.ledger:
            found[f"{transfer.kind.value}_blocks"] += len(transfer)
        return found

    # --- tiers begin transfers ----------------------------------------------------------
    def store(
        self, owner: Owner, program: str, blocks: ChainBlocks, slots: Tickets, now: float
    ) -> Transfer:
        """Queue a store of VRAM `blocks`, pairwise into `slots`; they are held until it settles."""
        hold = self.holds.take(blocks.blocks, blocks.ids)
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
        if not self.num_loads:
            self.loads_since = now
        self.num_load_blocks += len(slots)
        return self._admitted(owner, self.ledger.load(program, request_id, blocks, slots, now))

    def below(
        self,
        owner: Owner,
        kind: Kind,
        program: str,
        places: PlacesBelow,
        slots: Tickets,
        now: float,
    ) -> Transfer:
        """Queue a write of host `slots` to places below DRAM, or a read from there into them."""
        return self._admitted(owner, self.ledger.below(kind, program, places, slots, now))

    def say(self, **fields: Any) -> None:
        """The next plan says this besides (StepPlan)."""
        self._said |= fields

    def cancel(self, transfer: Transfer) -> None:
        """The transfer is no longer wanted: what has not begun of it does not begin."""
        if transfer.state is not TransferState.QUEUED:
            self.ledger.cancel(transfer)
        elif self.ledger.abandon(transfer):
            self._settled(transfer, transfer.admitted)

    def abandon(self, owner: Owner) -> list[Transfer]:
        """The tier wants none of its transfers any more, except loads, for which requests wait.
        Returns those that are over because they had not left yet. VRAM blocks are free at once."""
        over = []
        for transfer in self.ledger:
            if transfer.kind is Kind.LOAD or self._owners[transfer.id] is not owner:
                continue
            self._release(transfer)
            if self.ledger.abandon(transfer):
                self._settled(transfer, transfer.admitted)
                over.append(transfer)
        return over

    # --- every step -------------------------------------------------------------------
    def look(self, now: float) -> None:
        """Called once a step, before what it begins: cancel what takes too long.

        Where even that does not end a copy, later ones would wait behind it, so its tier promises
        nothing more. Its request goes on waiting, because it would be computed in the blocks that
        the copy may yet write to (vLLM keeps those behind a prefix hit for it).
        """
        self._looked = now
        for deadlines in self._all_deadlines:
            hung = deadlines.step(now)
            if hung is not None:
                owner = self._owners[hung.id]
                self._hung.add(owner)
                owner.hangs(
                    f"{hung.kind.value} {hung.id} hangs: begun {now - hung.admitted:.0f} s ago, "
                    f"cancelled, and the {owner.below or 'driver'} has not ended it"
                )

    def drain(self) -> StepPlan:
        """Return this step's orders for the workers."""
        plan, said = self.ledger.drain(), self._said
        if said:
            plan, self._said = replace(plan, **said), {}
        return plan

    def settle(self, report: WorkerReport, now: float) -> list[Transfer]:
        """Take in which copies the workers ended; returns the transfers that are over."""
        over = self.ledger.settle(report)
        for transfer in over:
            self._settled(transfer, now)
        return over

    def next_look(self, every_s: float = math.inf) -> float:
        """From when on an otherwise idle engine must step for the copies in flight, because workers
        report only in steps. At once if one of VRAM is under way; for one below DRAM, and for what
        hangs, perhaps for ever, only now and then. `every_s`: how often it steps in any case."""
        if not len(self.ledger):
            return self._looked + every_s
        if any(self._owners_of(below=False)):
            return -math.inf
        is_awaited = any(not transfer.cancelled for transfer in self.ledger)
        goes_on = is_awaited and any(self._owners_of(below=True))
        return self._looked + min(BELOW_LOOK_S if goes_on else LOOK_S, every_s)

    def _owners_of(self, below: bool) -> Iterator[Owner]:
        """Owners of VRAM's copies, or of those below DRAM, that have some under way and none that
        hangs."""
        for owner, number in self._num_owned.items():
            if number and bool(owner.below) is below and owner not in self._hung:
                yield owner

    def oldest_store_age(self, now: float) -> float | None:
        """Seconds since the oldest store that holds blocks was queued, or None if none does."""
        if not self.holds.num_blocks:
            return None
        held = (t for t in self.ledger if t.kind is Kind.STORE and t.hold)  # the oldest first
        oldest = next(held, None)
        return None if oldest is None else now - oldest.admitted

    @property
    def oldest_below_s(self) -> float:
        """How old the oldest read or write under way was in the last step."""
        first = next((each for each in self.ledger if each.kind in BELOW), None)  # oldest first
        return 0.0 if first is None else max(0.0, self._looked - first.admitted)

    def update_gauges(self) -> None:
        """Set the number of transfers in flight, with which the counters balance."""
        for kind, number in self._num_in_flight.items():
            self._account.gauge("transfers_in_flight", number, kind.value)

    # --- parts ------------------------------------------------------------------------
    def _admitted(self, owner: Owner, transfer: Transfer) -> Transfer:
        self._owners[transfer.id] = owner
        self._num_owned[owner] += 1
        self._deadlines[transfer.kind].add(transfer)
        self._num_in_flight[transfer.kind] += 1
        self._account.count("transfers_admitted", label=transfer.kind.value)
        return transfer

    def _settled(self, transfer: Transfer, now: float) -> None:
        owner = self._owners.pop(transfer.id)
        owner.settled(transfer)
        self._release(transfer)
        if transfer.kind is Kind.LOAD:
            self.num_load_blocks -= len(transfer)
            self.loads_since = now
        self._num_owned[owner] -= 1
        if not self._num_owned[owner]:
            self._hung.discard(owner)
        self._num_in_flight[transfer.kind] -= 1
        self._count(transfer, now)

    def _release(self, transfer: Transfer) -> None:
        if (hold := transfer.let_go()) is not None:
            self.holds.release(hold)

    def _count(self, transfer: Transfer, now: float) -> None:
        account, outcome = self._account, transfer.outcome
        assert outcome is not None
        names = _COUNTED[transfer.kind]
        is_late = transfer.cancelled and transfer.state is TransferState.FAILED
        is_cancelled = is_late and transfer.kind is not Kind.STORE
        account.count(names.settled, label="cancelled" if is_cancelled else transfer.state.value)
        for reason in set(outcome.reasons):
            is_timeout = is_late and reason == "cancelled"
            account.count(names.failed, label="timeout" if is_timeout else reason)
        if transfer.state is TransferState.DONE:
            if names.num_blocks:
                account.count(names.num_blocks, len(transfer))
            account.count(names.num_bytes, outcome.num_bytes)
            account.observe(names.seconds, now - transfer.admitted)
