"""UnderWay: the reads under way, what each of them brings to DRAM, and which turns wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.events import TierEvents
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.on_disk.index import DiskIndex
from continuum_connector.scheduler.tiers.on_disk.wanted import OnDisk, Prompt, Wanted
from continuum_connector.scheduler.tiers.slots import Numbers, Tickets, numbers_of
from continuum_connector.scheduler.tiers.traffic import Owner, Traffic
from continuum_connector.scheduler.tiers.transfers import DiskPlaces, Kind, Transfer, TransferState

MAX_READ_BYTES = 64 << 20  # of one order, on a rank: each order that settles is a longer hit


@dataclass(eq=False)
class Wait:
    """What a turn waits for. `reads`: the first one last; `start`: where its load begins, in
    blocks; `came`: the places in its chain of what reads brought. `rest`: what is still to be read
    if DRAM had no room for it but may soon; `lacks`: the first block that got no room. `told`: what
    is told of it all."""

    deadline: float
    told: OnDisk
    reads: list[Read] = field(default_factory=list)
    start: int = 0
    came: list[Numbers] = field(default_factory=list)
    rest: Wanted | None = None
    lacks: Key = b""


@dataclass(eq=False)
class Read:
    """A read under way: what it brings where, and which turns wait for it."""

    transfer: Transfer
    tickets: Tickets
    places: Numbers
    waits: list[Wait] = field(default_factory=list)


class UnderWay:
    """Begins reads into slots that are reserved for them, and settles them.

    `num_blocks`: how many blocks they are to bring; `began`: when the last of them was begun.
    """

    def __init__(
        self, slot_blocks: int, block_bytes: int, dram: HostIndex, disk: DiskIndex, traffic: Traffic
    ) -> None:
        """`slot_blocks`: blocks of a disk slot; `block_bytes`: of a block, on one rank."""
        self._length = slot_blocks
        self._slot_bytes = slot_blocks * block_bytes
        self._dram = dram
        self._disk = disk
        self._traffic = traffic
        self._reads: dict[int, Read] = {}  # by transfer
        self._read_to: dict[int, Read] = {}  # by the host slot that it writes to
        self.num_blocks = 0
        self.began = -np.inf
        self.max_read_bytes = MAX_READ_BYTES
        self.events: TierEvents | None = None  # of DRAM, to which the blocks come

    def __contains__(self, read: Read) -> bool:
        return read.transfer.id in self._reads

    def into(self, numbers: Numbers) -> list[Read]:
        """The reads into these slots of DRAM."""
        if not self._read_to:
            return []
        found = (self._read_to.get(number) for number in numbers.tolist())
        return list(dict.fromkeys(read for read in found if read is not None))

    def begin(
        self, owner: Owner, prompt: Prompt, depths: Numbers, targets: Tickets, now: float
    ) -> list[Read]:
        """Queue reads of these disk slots, given by their places in the chain, in its order.
        `targets`: the slot of DRAM for each block of the chain, -1 if it is not to be read."""
        step = max(1, self.max_read_bytes // self._slot_bytes)
        parts = (depths[first : first + step] for first in range(0, len(depths), step))
        return [self._begin(owner, prompt, part, targets, now) for part in parts]

    def join(self, wait: Wait, reads: Sequence[Read], wanted: Wanted, block_tokens: int) -> None:
        """Let a turn wait for these reads."""
        for read in reads:
            read.waits.append(wait)
            if self.events is not None and len(read.waits) == 1:
                places = read.places.tolist()
                ends = [(place + 1) * block_tokens for place in places]
                named = [wanted.keys[place] for place in places]
                self.events.describe(read.transfer.id, wanted.request, named, ends)
        wait.reads = list(reads)[::-1]

    def leave(self, wait: Wait) -> None:
        """The turn waits no more. What no turn waits for and has not begun is not read."""
        reads, wait.reads, wait.rest = wait.reads, [], None
        for read in reads:
            if read in self:
                read.waits.remove(wait)
                if not read.waits:
                    self._dram.disown(read.tickets)
                    self._traffic.cancel(read.transfer)

    def settled(self, transfer: Transfer) -> None:
        """A read is over. What it brought, before a bad slot ended it, can be found in DRAM, marked
        as on disk as well."""
        read = self._reads.pop(transfer.id)
        numbers = numbers_of(read.tickets)
        self.num_blocks -= len(numbers)
        for number in numbers.tolist():
            del self._read_to[number]
        is_here = np.repeat(transfer.copied(), self._length)[transfer.slots >= 0]
        here = read.tickets[is_here]
        if self._dram.marks is not None:
            self._dram.marks.save(here[self._dram.are_there(here)])
        self._dram.settle(here, stored=True)
        self._dram.settle(read.tickets[~is_here], stored=False)
        if self.events is not None:
            self.events.stored(transfer.id, set(self._dram.keys_of(read.tickets)))
        for wait in read.waits:
            if is_here.any():
                wait.came.append(read.places[is_here])
            if transfer.state is not TransferState.DONE:
                wait.told.why = wait.told.why or "failed"

    def disown(self) -> None:
        """What is being read is no longer wanted."""
        for read in self._reads.values():
            self._dram.disown(read.tickets)

    def _begin(
        self, owner: Owner, prompt: Prompt, depths: Numbers, targets: Tickets, now: float
    ) -> Read:
        wanted, length, numbers = prompt.wanted, self._length, prompt.on_disk[depths]
        places = (depths[:, None] * length + np.arange(length)).ravel()
        names = [wanted.names[depth] for depth in depths.tolist()]
        disk = DiskPlaces(numbers.astype(np.int32), names, depths.tolist())
        self._disk.acquire(numbers)
        self.began = now
        what = wanted.program, disk, targets[places]
        transfer = self._traffic.of_disk(owner, Kind.READ, *what, now)
        transfer.num_ahead = self.num_blocks
        self.num_blocks += len(transfer)
        places = places[transfer.slots >= 0]
        read = self._reads[transfer.id] = Read(transfer, targets[places], places)
        self._read_to.update(dict.fromkeys(numbers_of(read.tickets).tolist(), read))
        return read
