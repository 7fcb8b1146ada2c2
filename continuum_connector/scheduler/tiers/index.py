"""HostIndex: which blocks are in DRAM, in which slot, and how room is made for more.

A slot is FREE, WRITING (a store is under way) or READY; a READY slot may have readers. Only READY
slots are ever found. A slot that is forgotten while it is written or read becomes an orphan: it is
not found, and is FREE once that is over. A new epoch begins with empty tables; slots of the old
ones become FREE little by little (slots.py, Past).

Each turn keeps a chain of slots. Chains leave tail first, in the order of chains.py; a slot that
several chains claim, as those of a common system prompt, leaves with the last of them.

Where a hit needs more than every block before its end, such as the state or the window there, a
chain without its tail is useless: then chains are stored whole and leave whole (`whole`).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from continuum_connector.errors import InvariantError
from continuum_connector.scheduler.kv_groups import Flags, Key, Numbers
from continuum_connector.scheduler.tiers.base import Below, NothingBelow
from continuum_connector.scheduler.tiers.chains import (
    AHEAD,
    EvictionOrder,
    Residence,
    SlotClaims,
    Standing,
    live_worth,
)
from continuum_connector.scheduler.tiers.slots import (
    NO_TICKETS,
    Chain,
    FreeSlots,
    Past,
    Rank,
    SlotTable,
    Tickets,
    numbers_of,
)

NOBODYS = Chain("", 0.0)  # stands for no chain: beside it every chain may leave


class HostIndex:
    """Block hash -> slot, the slots' states, and the chains that claim them. `below`: what else
    keeps what leaves."""

    def __init__(
        self,
        num_slots: int,
        whole: bool = False,
        below: Callable[[HostIndex], Below] | None = None,
    ) -> None:
        self._whole = whole
        self.num_slots = 0  # that exist by now, see `grow`
        self.num_ready = 0
        self.num_writing = 0  # including orphans being written
        self.version = 0  # grows whenever a lookup may answer differently
        self.num_epochs = 0  # a READY slot's ticket is void in any other epoch
        self.num_lost = 0  # grows by one with every READY slot that is forgotten
        self.num_evicted = 0  # for room, ever
        self.num_refused = 0  # blocks for which no room was made, ever
        self.residence = Residence()
        self.gone: deque[Key] = deque()  # keys forgotten for any reason since the last take
        self._free = FreeSlots()
        self._numbers: dict[Key, int] = {}
        self._table = SlotTable()
        self.past = Past(self._regain)  # of earlier epochs
        self.below = NothingBelow() if below is None else below(self)
        self._claims = SlotClaims(self._table, self.below)
        self.grow(num_slots)

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on, and are used after those that did before. If
        there were more, the others are away until they exist again."""
        if num_slots > self.num_slots:
            self._free.grow(self.num_slots, num_slots)
            self._table.grow(num_slots)
            self.below.grow(num_slots)
            self.num_slots = num_slots
            self.residence = Residence()  # the DRAM is larger now; nothing has to leave it
        self._free.end_at(num_slots)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing, or nothing of this epoch."""
        return self._free.num + len(self._free.away) + self.past.num

    def __contains__(self, key: Key) -> bool:
        return key in self._numbers

    def is_ready(self, key: Key) -> bool:
        number = self._numbers.get(key)
        return number is not None and not self._table.is_writing[number]

    def find(self, keys: Sequence[Key]) -> Tickets:
        """The READY slots of `keys`, from the first key on until one has none."""
        numbers = self.slots_of(keys)
        numbers = numbers[: _first(numbers < 0)]
        return self._table.tickets[numbers[: _first(self._table.is_writing[numbers])]]

    def still_ready(self, tickets: Tickets) -> int:
        """How many of the tickets, from the first on, are of slots that can be read."""
        return _first(~self._table.are_ready(tickets))

    # --- stores -----------------------------------------------------------------------
    def reserve(
        self,
        keys: Sequence[Key],
        program: str,
        now: float,
        rank: Rank | None = None,
        num_prompt: int = 0,
        ends: Sequence[int] = (),
        numbers: Numbers | None = None,
        is_ahead: bool = False,
    ) -> Tickets:
        """Claim slots for those of `keys`, one chain, that are not stored yet, evicting if needed.

        Returns a WRITING slot per new key. Stops at the first key for which no room can be made,
        because all else is busy or, by `rank`, worth more. So a prefix is stored, or all or nothing
        where chains are `whole`. Without `rank`, the least recently used is worth least.
        `num_prompt`: how many of `keys` the prompt has. `ends`: where the blocks end, in tokens.
        `numbers`: what `slots_of` says of the keys, if the caller has asked; it is changed.
        `is_ahead`: only what is over and other chains of the program leave for it.
        """
        numbers = self.slots_of(keys) if numbers is None else numbers
        present, missing = numbers[numbers >= 0], (numbers < 0).nonzero()[0]
        loan = self.order.loans.get(program)
        chain = self._claims.begin(present, program, now, num_prompt)
        victims: list[Chain] = []
        claimed = self._make_room(len(missing), chain, now, rank, is_ahead, victims)
        self.num_refused += len(missing) - len(claimed)
        if self._whole and len(claimed) < len(missing):
            self._claims.withdraw(chain)
        missing = missing[: len(claimed)]
        self.below.used(present)
        given = loan.given if loan else None
        uses = (given.get(keys[n], 0) for n in missing.tolist()) if given else 0
        self.below.came(claimed, ends, missing, uses)
        if len(claimed):
            is_all = len(missing) == len(keys)
            named = keys if is_all else [keys[place] for place in missing.tolist()]
            self._numbers.update(zip(named, claimed.tolist(), strict=True))
            self._table.claim(claimed, named)
            numbers[missing] = claimed
            self._claims.extend(chain, claimed if is_all else numbers[numbers >= 0])
            self.num_writing += len(claimed)
        self._claims.drop_empty([*victims, chain])
        for leaving in self._claims.excess(chain, self._whole):
            self._evict(leaving)
            self._free.put(leaving)
        return self._table.tickets[claimed]

    def settle(self, tickets: Tickets, stored: bool) -> None:
        """Their store is over: READY if it succeeded and is still wanted, else FREE."""
        numbers, there = numbers_of(tickets), self._table.are_there(tickets)
        idle = numbers[~self._table.is_writing[numbers]]
        if len(idle):
            raise InvariantError(f"slots {idle}: expected WRITING, found READY or FREE")
        self._table.is_writing[numbers] = False
        self.num_writing -= len(numbers)
        if stored:
            unwanted = numbers[~there]
            self.num_ready += len(numbers) - len(unwanted)
            self._free.put(unwanted)
        else:
            self._forget(numbers[there])
            self._free.put(numbers)
        self.version += 1

    def disown(self, tickets: Tickets) -> None:
        """What is being written to these slots is no longer wanted: its blocks may be stored anew,
        and the slots are FREE once the write has settled."""
        self._forget(numbers_of(tickets[self._table.are_there(tickets)]))

    def keys_of(self, tickets: Tickets) -> list[Key]:
        """The keys of those that were not forgotten."""
        there = tickets[self._table.are_there(tickets)]
        return list(self._table.keys[numbers_of(there)].tolist())

    def is_at(self, ticket: int, key: Key) -> bool:
        """Whether the key is where that ticket says."""
        number = self._numbers.get(key)
        return number is not None and int(self._table.tickets[number]) == ticket

    def acquire(self, tickets: Tickets) -> Tickets:
        """Start reading; all must be READY. The slots cannot be reused meanwhile."""
        if self.still_ready(tickets) < len(tickets):
            lost = numbers_of(tickets[~self._table.are_ready(tickets)])
            raise InvariantError(f"slots {lost}: expected READY, found another state")
        self._table.num_readers[numbers_of(tickets)] += 1
        return tickets

    def release(self, tickets: Tickets, corrupt: bool = False) -> None:
        """Stop reading. `corrupt`: what was read cannot be trusted, so forget the slots."""
        table, numbers = self._table, numbers_of(tickets)
        table.num_readers[numbers] -= 1
        if corrupt:
            self._lose(numbers[table.are_there(tickets)])
        orphans = numbers[~table.are_there(tickets)]
        self._free.put(orphans[table.num_readers[orphans] == 0])

    # --- order ------------------------------------------------------------------------
    @property
    def order(self) -> EvictionOrder:
        """In which order chains leave; another one in each epoch."""
        return self._claims.order

    def next_to_leave(self, rank: Rank | None) -> Iterator[Chain]:
        """Live chains in the order in which they leave, until something changes."""
        return (chain for _, chain in self._claims.order.victims(NOBODYS, rank, only_live=True))

    def use(self, program: str, last: Tickets, now: float) -> None:
        """A turn of the program loads a chain up to this ticket's slot."""
        self._claims.use(program, last, now)

    def demote(self, program: str, keys: Sequence[Key], num_prompt: int = 0) -> None:
        """The program's last turn has these keys: the chains that it continues leave first."""
        self._claims.demote(program, self.slots_of(keys), num_prompt)

    def chains_of(self, program: str) -> Sequence[Chain]:
        """The program's live chains."""
        return self._claims.order.live_of(program)

    def slots_of(self, keys: Sequence[Key], program: str = "") -> Numbers:
        """The slots of one chain's keys, READY or WRITING; -1 where there is none. Those that the
        newest chain of the `program` has are not looked up again."""
        known = self._slots_of_chain(keys, program)
        if len(known) == len(keys):
            return known
        found = self._look_up(keys[len(known) :])
        return np.concatenate((known, found)) if len(known) else found

    def _slots_of_chain(self, keys: Sequence[Key], program: str) -> Numbers:
        """The slots of the first keys, if the program's newest chain has all of them. A block's
        key covers all before it, and a chain has one slot per block, so its tip in its place is
        enough; but a slot that is gone may hold another block by now."""
        current = self.order.current(program)
        tickets = current[-1].tickets if current and not self._whole else NO_TICKETS
        num = len(tickets)
        if not 0 < num <= len(keys) or not self._table.are_there(tickets).all():
            return NO_TICKETS
        numbers = numbers_of(tickets)
        return numbers if self._table.keys[numbers[-1]] == keys[num - 1] else NO_TICKETS

    def _look_up(self, keys: Sequence[Key]) -> Numbers:
        if self._numbers.keys().isdisjoint(keys):  # new keys cost a third this way
            return np.full(len(keys), -1)
        found = map(self._numbers.get, keys, itertools.repeat(-1))
        return np.fromiter(found, np.int64, len(keys))

    def are_there(self, tickets: Tickets) -> Flags:
        """Which of them were not forgotten."""
        return self._table.are_there(tickets)

    def are_ready(self, tickets: Tickets) -> Flags:
        """Which of them can be read."""
        return self._table.are_ready(tickets)

    def take_gone(self) -> Sequence[Key]:
        """The keys forgotten for any reason since the last call."""
        gone, self.gone = self.gone, deque()
        return gone

    def keys_at(self, numbers: Numbers) -> list[Key]:
        """What the slots hold."""
        return list(self._table.keys[numbers].tolist())

    def clear(self) -> None:
        """Begin a new epoch: from now on nothing older is found. Only slots being written or read
        are marked as gone, and become FREE once that is over. All other old tickets still look
        valid, so a caller that keeps tickets must compare `num_epochs`."""
        table = self._table
        busy = (table.is_writing | (table.num_readers > 0)).nonzero()[0]
        busy = busy[np.array([key is not None for key in table.keys[busy].tolist()], np.bool_)]
        self._forget(busy[table.is_writing[busy]])
        self._lose(busy[~table.is_writing[busy]])
        self.num_lost += self.num_ready
        self.past.add(self._numbers, *self._claims.clear())
        self._numbers, self.num_ready = {}, 0
        self.version += 1
        self.num_epochs += 1
        self.residence = Residence()

    # --- room -------------------------------------------------------------------------
    def _make_room(
        self,
        num_wanted: int,
        chain: Chain,
        now: float,
        rank: Rank | None,
        is_ahead: bool,
        victims: list[Chain],
    ) -> Numbers:
        """Return slots: the free ones, then those of chains worth no more than `chain`; none if
        that is too few and chains are whole. The caller then drops `victims` that are empty."""
        if self._free.num < num_wanted:
            self.past.yield_slots(num_wanted - self._free.num)
        free = self._free.take(num_wanted)
        if len(free) == num_wanted:
            return free
        num_missing, below = num_wanted - len(free), self.below
        own = AHEAD if is_ahead else live_worth(rank, chain.program, now)
        tails_first = (is_ahead or own.rank > -math.inf) and below.takes_all(now)
        num_whole = num_missing if self._whole else 0
        taken, num_lost = [free], 0  # live blocks
        for worth, victim, most in self._claims.leaving(chain, own, rank, tails_first, num_whole):
            victims.append(victim)
            most = min(most, num_missing)
            for leaving in self._claims.let_go(victim, None if self._whole else most):
                if worth.standing is Standing.LENT:
                    given = zip(self.keys_at(leaving), below.uses(leaving), strict=False)
                    self.order.loans[victim.program].given.update(given)
                elif worth.standing is not Standing.OVER:
                    num_lost += below.left(leaving, victim.program)
                taken.append(leaving)
                num_missing -= len(leaving)
            if num_missing <= 0:
                break
        if num_lost:
            self.residence.evicted(num_lost, self.num_slots, now)
        slots = np.concatenate(taken)
        self._evict(slots[len(free) :])
        spare = 0 if self._whole and len(slots) < num_wanted else num_wanted
        self._free.put(slots[spare:])
        return slots[:spare]

    def _regain(self, numbers: Numbers) -> None:
        """Take back these slots of earlier epochs: they are FREE now."""
        keys = self._table.forget(numbers)
        self._free.put(numbers)
        self.gone.extend(key for key in keys if key not in self._numbers)

    def _evict(self, numbers: Numbers) -> None:
        self._lose(numbers)
        self.num_evicted += len(numbers)

    def _lose(self, numbers: Numbers) -> None:
        self._forget(numbers)
        self.num_ready -= len(numbers)
        self.num_lost += len(numbers)

    def _forget(self, numbers: Numbers) -> None:
        """The slots are not found any more; chains that claim them drop these claims later."""
        if len(numbers):
            keys = self._table.forget(numbers)
            deque(map(self._numbers.__delitem__, keys), maxlen=0)  # in C: a turn may lose thousands
            self.gone.extend(keys)
            self.version += 1


def _first(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """The place of the first flag that is set, or how many flags there are."""
    first = int(flags.argmax()) if len(flags) else 0
    return first if first < len(flags) and flags[first] else len(flags)
