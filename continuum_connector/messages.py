"""What crosses between the scheduler and the workers: block ids, and what became of them.

Workers never learn of requests' tokens, programs, tools or time (law 7). Of a block's content they
learn only its name, a hash, and only if it goes to a disk, which outlives them. One `StepPlan` goes
down with each step, and one `WorkerReport` comes up from each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StoreOrder:
    """Copy VRAM `blocks` to host `slots`, pairwise; both int32 of one length."""

    transfer_id: int
    blocks: BlockIds
    slots: BlockIds


@dataclass(frozen=True)
class LoadOrder:
    """Copy host `slots` to VRAM `blocks`, pairwise; `request_id` waits for it."""

    transfer_id: int
    request_id: str
    blocks: BlockIds
    slots: BlockIds


@dataclass(frozen=True)
class WriteOrder:
    """Write host `slots` to `disk_slots`, whose names become `keys`.

    A disk slot takes as many blocks as fit: `slots` is int32 [len(disk_slots) * that many], and the
    first ones go to the first disk slot. For each disk slot, `keys` has the key of its last block,
    and `depths` its place in its chain, counted in disk slots.
    """

    transfer_id: int
    slots: BlockIds
    disk_slots: BlockIds
    keys: tuple[bytes, ...]
    depths: tuple[int, ...]


@dataclass(frozen=True)
class ReadOrder:
    """Read `disk_slots`, which must hold `keys`, into host `slots`, in the order of a WriteOrder. A
    block whose slot is -1 is not wanted, because DRAM has it."""

    transfer_id: int
    slots: BlockIds
    disk_slots: BlockIds
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class StepPlan:
    """Everything the workers shall do in one step, in this order: cancels, the disk's reset, loads,
    reads, stores, writes.

    A transfer that one plan both cancels and orders is not begun. `resets_disk`: what is on disk by
    now is foreign from here on. `epoch`: the one whose KV the orders are about. It grows with each
    new epoch, and every plan carries it, so that a rank knows in which one its weights changed.
    `disk_spent`: bytes of the write budget that a restart is to find spent; None: as was said.
    """

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    cancels: tuple[int, ...] = ()
    reads: tuple[ReadOrder, ...] = ()
    writes: tuple[WriteOrder, ...] = ()
    resets_disk: bool = False
    epoch: int = 0
    disk_spent: int | None = None

    @property
    def is_empty(self) -> bool:
        copies = self.loads or self.stores or self.cancels
        return not (copies or self.reads or self.writes or self.resets_disk)


@dataclass
class TransferOutcome:
    """How many ranks finished one transfer, and how.

    `reasons` holds each failing rank's one-word cause ("driver", "refused", "cancelled",
    "closed", "no_tier", "corrupt"; "stale": of an epoch whose weights are gone; "asleep": the
    KV cache or the slots are away; for a disk also "eio", "enospc", and "missing": the slot holds
    another name). `num_bytes` and `seconds` are summed over the ranks that are done.

    Of a write or a read that failed, by their places in its order: `copied`, the disk slots that
    all failing ranks copied even so; `bad`, those in which a rank found "eio", "corrupt" or
    "missing". The others were not begun.
    """

    num_done: int = 0
    num_failed: int = 0
    reasons: tuple[str, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0
    copied: frozenset[int] = frozenset()
    bad: dict[str, frozenset[int]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.num_done + self.num_failed

    def add(self, other: TransferOutcome) -> None:
        """Add other ranks' results of the same transfer."""
        if other.num_failed:
            self.copied = self.copied & other.copied if self.num_failed else other.copied
        for reason, places in other.bad.items():
            self.bad[reason] = self.bad.get(reason, frozenset()) | places
        self.num_done += other.num_done
        self.num_failed += other.num_failed
        self.reasons += other.reasons
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds


@dataclass(frozen=True)
class OnDisk:
    """What a restart found in one slot of a disk. `sequence` orders the writes, within a rank."""

    slot: int
    sequence: int
    depth: int
    key: bytes


@dataclass(frozen=True)
class DiskSpent:
    """Bytes of the write budget that an earlier server had spent, and how long ago that was."""

    num_bytes: int
    age_s: float


@dataclass
class WorkerReport:
    """What one rank (after `merge`: several ranks) saw settle since its last report.

    `ready_slots`: per rank, how many host slots it can use, if that has changed; `disk_slots`: how
    many slots of a disk. `tier_down`, `disk_down`: the sentence that says why a rank has no
    DRAM tier, or no disk, or "" if it has one. `found`: per rank, what a restart found on its disk,
    in pieces; a block counts once every rank has found it in the same slot. `disk_scanned`: the
    ranks that have told all they found; `disk_spent`: what those know whose disk was used before,
    with the first report of it. `new_weights`: in what way the weights under a rank changed since
    its last report, "" if they did not; `changed_in`: the newest epoch that it knew then, negative
    if it does not say.
    """

    outcomes: dict[int, TransferOutcome] = field(default_factory=dict)
    ready_slots: dict[int, int] = field(default_factory=dict)
    tier_down: str = ""
    disk_slots: dict[int, int] = field(default_factory=dict)
    disk_down: str = ""
    found: dict[int, list[OnDisk]] = field(default_factory=dict)
    disk_scanned: set[int] = field(default_factory=set)
    disk_spent: dict[int, DiskSpent] = field(default_factory=dict)
    new_weights: str = ""
    changed_in: int = -1

    @property
    def is_empty(self) -> bool:
        of_disk = self.disk_slots or self.disk_down or self.found or self.disk_scanned
        of_rank = self.ready_slots or self.tier_down or self.new_weights
        return not (self.outcomes or of_rank or of_disk or self.disk_spent)

    def lose_tier(self, why: str) -> None:
        self.tier_down = why

    def lose_disk(self, why: str) -> None:
        self.disk_down = why

    def change_weights(self, how: str, changed_in: int) -> None:
        self.new_weights, self.changed_in = how, changed_in

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Sum both reports into this one and return it."""
        for transfer_id, outcome in other.outcomes.items():
            self.outcomes.setdefault(transfer_id, TransferOutcome()).add(outcome)
        for rank, num_slots in other.ready_slots.items():
            self.ready_slots[rank] = max(num_slots, self.ready_slots.get(rank, 0))
        self.tier_down = self.tier_down or other.tier_down
        self.new_weights = self.new_weights or other.new_weights
        self.changed_in = max(self.changed_in, other.changed_in)
        self.disk_slots |= other.disk_slots
        self.disk_down = self.disk_down or other.disk_down
        self.disk_scanned |= other.disk_scanned
        self.disk_spent |= other.disk_spent
        for rank, found in other.found.items():
            self.found.setdefault(rank, []).extend(found)
        return self
