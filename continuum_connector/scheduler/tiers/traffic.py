"""Traffic: every copy between VRAM and the tiers or among the tiers, whichever tier it belongs to.

It holds the VRAM blocks of stores until they settle, cancels copies that take too long, finds those
that hang even then, and counts. Tiers begin transfers here and are told when they are over.

TransferLedger: every copy from queued to settled, each counted exactly once. A transfer keeps alive
what it needs (VRAM blocks of a store, host slots of a load or a write) until every rank has
reported.

Transfers that take too long are cancelled. One that does not end even then hangs: the driver has
its copies and does not give them back.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from continuum_connector.errors import InvariantError
from continuum_connector.messages import (
    BlockIds,
    LoadOrder,
    ReadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
    WriteOrder,
)
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.holds import Hold, HoldTable
from continuum_connector.scheduler.kv_groups import ChainBlocks, Flags, Key, Numbers


class Kind(enum.Enum):
    # Members are singletons; Enum's own hash is a Python call, and each copy needs a dozen of them.
    __hash__ = object.__hash__

    STORE = "store"  # VRAM to DRAM
    LOAD = "load"  # DRAM to VRAM
    WRITE = "write"  # DRAM to a memory below it
    READ = "read"  # from there to DRAM


class TransferState(enum.Enum):
    QUEUED = "queued"  # leaves with the next step plan
    SUBMITTED = "submitted"  # the workers have it
    DONE = "done"  # every rank has copied every block
    FAILED = "failed"  # a rank has not
    ABANDONED = "abandoned"  # the result is no longer wanted; still settles


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


@dataclass(eq=False)
class Transfer:
    """One batch of block copies. `blocks` are VRAM block ids, pairwise with `slots`; the slots of a
    load that every rank is to refuse are -1.

    Of a write or a read, `blocks` are slots below DRAM, named by `keys`, each of as many blocks as
    it has `slots`; slots of blocks that a read does not bring are -1. `depths`: places in the
    chain. `num_ahead`: blocks of the reads that were under way before it, which are brought first.
    `late_since`: when it was cancelled because it took too long, and in which step.
    """

    id: int
    owner: Owner
    kind: Kind
    program: str
    blocks: BlockIds
    slots: Numbers
    admitted: float
    request_id: str = ""  # that waits for a load
    hold: Hold | None = None
    state: TransferState = TransferState.QUEUED
    cancelled: bool = False
    outcome: TransferOutcome | None = None
    keys: tuple[Key, ...] = ()
    depths: tuple[int, ...] = ()
    num_ahead: int = 0
    late_since: tuple[float, int] | None = None

    def keep(self, hold: Hold) -> None:
        """Keep its VRAM blocks alive until it settles."""
        self.hold = hold

    def let_go(self) -> Hold | None:
        """Return the hold on its VRAM blocks, once, for the caller to release."""
        hold, self.hold = self.hold, None
        return hold

    def __len__(self) -> int:
        """How many blocks it brings."""
        if self.kind is Kind.READ:
            return int(np.count_nonzero(self.slots >= 0))
        return len(self.slots)

    def copied(self) -> Flags:
        """Which slots below of a write or a read that is over every rank has copied; none if it is
        no longer wanted."""
        are_copied = np.full(len(self.blocks), self.state is TransferState.DONE)
        if self.state is TransferState.FAILED and self.outcome is not None:
            are_copied[sorted(self.outcome.copied)] = True
        return are_copied

    def bad(self, *reasons: str) -> Flags:
        """Which slots below of it a rank found bad, for one of these reasons."""
        are_bad, bad = np.zeros(len(self.blocks), np.bool_), {}
        if self.outcome is not None:
            bad = self.outcome.bad
        for reason in reasons:
            are_bad[sorted(bad.get(reason, ()))] = True
        return are_bad


class TransferLedger:
    """Owns all transfers in flight. `world_size`: ranks that must report each one."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ids = itertools.count(1)
        self._in_flight: dict[int, Transfer] = {}
        self._queued: dict[int, Transfer] = {}
        self._cancels: list[int] = []
        self.epoch = 0  # of the orders that leave

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._in_flight.values()))

    def admit(
        self,
        owner: Owner,
        kind: Kind,
        program: str,
        blocks: BlockIds,
        slots: Numbers,
        now: float,
        **besides: Any,
    ) -> Transfer:
        """Queue a copy of `blocks`, pairwise with `slots`. `besides`: other fields of Transfer."""
        transfer = Transfer(next(self._ids), owner, kind, program, blocks, slots, now, **besides)
        num_blocks, num_slots = len(transfer.blocks), len(transfer.slots)
        is_whole = num_slots == num_blocks or (transfer.keys and num_slots % num_blocks == 0)
        if not num_blocks or not is_whole:
            raise InvariantError(f"{kind.value} of {num_blocks} blocks and {num_slots} slots")
        self._in_flight[transfer.id] = transfer
        self._queued[transfer.id] = transfer
        return transfer

    def drain(self) -> StepPlan:
        """Hand everything queued to the workers, in the order it was queued."""
        if not self._queued and not self._cancels:
            return StepPlan(epoch=self.epoch)
        orders: dict[Kind, list[Any]] = {}
        for transfer in self._queued.values():
            orders.setdefault(transfer.kind, []).append(_order(transfer))
            if transfer.state is TransferState.QUEUED:
                transfer.state = TransferState.SUBMITTED
        plan = StepPlan(
            loads=tuple(orders.get(Kind.LOAD, ())),
            stores=tuple(orders.get(Kind.STORE, ())),
            cancels=tuple(self._cancels),
            reads=tuple(orders.get(Kind.READ, ())),
            writes=tuple(orders.get(Kind.WRITE, ())),
            epoch=self.epoch,
        )
        self._queued, self._cancels = {}, []
        return plan

    def cancel(self, transfer: Transfer) -> None:
        """Ask the workers to stop it. It still settles, as failed unless it ended before that."""
        if not transfer.cancelled:
            transfer.cancelled = True
            self._cancels.append(transfer.id)

    def begin_epoch(self) -> int:
        """Begin a new epoch of orders, and return its number. Loads under way bring KV of the last
        one, which is no longer wanted; but requests wait for their end. So they leave if they have
        not, are stopped, and settle as abandoned."""
        for transfer in self:
            if transfer.kind is Kind.LOAD and transfer.state is not TransferState.ABANDONED:
                transfer.state = TransferState.ABANDONED
                self.cancel(transfer)
        self.epoch += 1
        return self.epoch

    def abandon(self, transfer: Transfer) -> bool:
        """The result is no longer wanted. True if that ends the transfer, because it never left.

        What has left is cancelled, so that it does not go on copying blocks that may be another
        request's by now, and settles as abandoned.
        """
        never_left = transfer.state is TransferState.QUEUED
        transfer.state = TransferState.ABANDONED
        if never_left:
            del self._queued[transfer.id]
            self._finish(transfer, TransferOutcome())
        else:
            self.cancel(transfer)
        return never_left

    def settle(self, report: WorkerReport) -> list[Transfer]:
        """Count the ranks' outcomes; return the transfers on which every rank has reported."""
        settled = []
        for transfer_id, outcome in report.outcomes.items():
            transfer = self._in_flight.get(transfer_id)
            if transfer is None:
                raise InvariantError(f"transfer {transfer_id}: settled, but not in flight")
            transfer.outcome = transfer.outcome or TransferOutcome()
            transfer.outcome.add(outcome)
            if transfer.outcome.num_ranks > self._world_size:
                raise InvariantError(
                    f"transfer {transfer_id} ({transfer.kind.value}): {transfer.outcome.num_ranks} "
                    f"of {self._world_size} ranks reported"
                )
            if transfer.outcome.num_ranks == self._world_size:
                self._finish(transfer, transfer.outcome)
                settled.append(transfer)
        return settled

    def _finish(self, transfer: Transfer, outcome: TransferOutcome) -> None:
        del self._in_flight[transfer.id]
        transfer.outcome = outcome
        if transfer.state is not TransferState.ABANDONED:
            done = outcome.num_failed == 0
            transfer.state = TransferState.DONE if done else TransferState.FAILED


def _order(transfer: Transfer) -> LoadOrder | StoreOrder | WriteOrder | ReadOrder:
    slots = transfer.slots.astype(np.int32)  # the number: a ticket's lower half
    named = transfer.id, slots, transfer.blocks, transfer.keys
    if transfer.kind is Kind.LOAD:
        return LoadOrder(transfer.id, transfer.request_id, transfer.blocks, slots)
    if transfer.kind is Kind.STORE:
        return StoreOrder(transfer.id, transfer.blocks, slots)
    return ReadOrder(*named) if transfer.kind is Kind.READ else WriteOrder(*named, transfer.depths)


# What a cancel cannot take back is a trunk or two that are being copied: milliseconds.
HANGS_AFTER_S = 60.0
_MIN_STEPS = 10  # in which the workers could have reported that it has ended
# How often an engine with nothing else to do checks whether a copy that hangs has ended; and
# whether one below DRAM has, for which no request waits. If a request waits, it steps anyway.
LOOK_S = 1.0
BELOW_LOOK_S = 0.05
TIMEOUT_S = 30.0  # after which a store or a load is cancelled
BELOW = (Kind.WRITE, Kind.READ)


# As what the bytes of a copy are counted; below DRAM, the blocks are not.
_COPIED = {
    Kind.STORE: "stored",
    Kind.LOAD: "loaded",
    Kind.WRITE: "disk_written",
    Kind.READ: "disk_read",
}


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
        self._timeouts = {kind: below_timeout_s if kind in BELOW else timeout_s for kind in Kind}
        self._num_in_flight = Counter(dict.fromkeys(Kind, 0))
        self._num_owned: Counter[Owner] = Counter()
        self._hung: set[Owner] = set()  # those with a transfer that hangs
        self._looked = 0.0
        self._num_steps = 0
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

    # --- tiers begin transfers ----------------------------------------------------------
    def store(
        self, owner: Owner, program: str, blocks: ChainBlocks, slots: Numbers, now: float
    ) -> Transfer:
        """Queue a store of VRAM `blocks`, pairwise into `slots`; they are held until it settles."""
        hold = self.holds.take(blocks.blocks, blocks.ids)
        return self._admit(owner, Kind.STORE, program, hold.ids, slots, now, hold=hold)

    def load(
        self,
        owner: Owner,
        program: str,
        request_id: str,
        blocks: BlockIds,
        slots: Numbers,
        now: float,
    ) -> Transfer:
        """Queue a load into the request's VRAM `blocks`; it waits until this settles."""
        if not self.num_loads:
            self.loads_since = now
        self.num_load_blocks += len(slots)
        return self._admit(owner, Kind.LOAD, program, blocks, slots, now, request_id=request_id)

    def below(
        self,
        owner: Owner,
        kind: Kind,
        program: str,
        below: BlockIds,
        slots: Numbers,
        now: float,
        keys: Sequence[Key],
        depths: Sequence[int],
        num_ahead: int = 0,
    ) -> Transfer:
        """Queue a write of host `slots` to slots `below` DRAM, or a read from there into them. The
        rest as in Transfer."""
        named = {"keys": tuple(keys), "depths": tuple(depths), "num_ahead": num_ahead}
        return self._admit(owner, kind, program, below, slots, now, **named)

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
            if transfer.kind is Kind.LOAD or transfer.owner is not owner:
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
        self._num_steps += 1
        hung: dict[Owner, Transfer] = {}
        for transfer in self.ledger:  # the oldest first
            age_s = now - transfer.admitted
            if age_s <= min(self._timeouts.values()):
                break
            if age_s <= self._timeouts[transfer.kind]:
                continue
            if transfer.late_since is None:
                transfer.late_since = now, self._num_steps
                self.ledger.cancel(transfer)
            since, step = transfer.late_since
            if now - since >= HANGS_AFTER_S and self._num_steps - step >= _MIN_STEPS:
                hung.setdefault(transfer.owner, transfer)
        for owner, transfer in hung.items():
            if owner not in self._hung:
                self._hung.add(owner)
                owner.hangs(
                    f"{transfer.kind.value} {transfer.id} hangs: begun "
                    f"{now - transfer.admitted:.0f} s ago, cancelled, and the "
                    f"{owner.below or 'driver'} has not ended it"
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

    def oldest_store_age(self, now: float) -> float:
        """Seconds since the oldest store that holds blocks was queued; infinite if none does."""
        held = (t.admitted for t in self.ledger if t.kind is Kind.STORE and t.hold)
        return now - next(held, -math.inf)  # the oldest is first

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
    def _admit(self, *what: Any, **besides: Any) -> Transfer:
        """Queue what TransferLedger.admit is given."""
        transfer = self.ledger.admit(*what, **besides)
        self._num_owned[transfer.owner] += 1
        self._num_in_flight[transfer.kind] += 1
        self._account.count("transfers_admitted", label=transfer.kind.value)
        return transfer

    def _settled(self, transfer: Transfer, now: float) -> None:
        owner = transfer.owner
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
        kind, copied, is_below = transfer.kind.value, _COPIED[transfer.kind], transfer.kind in BELOW
        is_late = transfer.cancelled and transfer.state is TransferState.FAILED
        is_cancelled = is_late and transfer.kind is not Kind.STORE
        account.count(f"{kind}s", label="cancelled" if is_cancelled else transfer.state.value)
        for reason in set(outcome.reasons):
            is_timeout = is_late and reason == "cancelled"
            failures = "disk_failures" if is_below else "transfer_failures"
            account.count(failures, label="timeout" if is_timeout else reason)
        if transfer.state is TransferState.DONE:
            if not is_below:
                account.count(f"{copied}_blocks", len(transfer))
            account.count(f"{copied}_bytes", outcome.num_bytes)
            account.observe(f"{kind}_seconds", now - transfer.admitted)
