"""Chains: what each turn left in DRAM, and in which order it leaves.

EvictionOrder: what finished programs left goes first, then what newer turns of their programs
superseded, each oldest first; then chains that are lent, because a running turn has their blocks in
VRAM and will store them anew, the latest first; then live chains by worth, which the caller
provides.

SlotClaims: which chains claim which slots. A program has one chain per branch, each with its own
last use. Only a turn that continues a chain supersedes it (law 8).

Residence: how long what is stored stays in DRAM before it leaves for room.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from continuum_connector.scheduler.kv_groups import Key, Numbers
from continuum_connector.scheduler.tiers.slots import (
    NO_TICKETS,
    TICKET_BYTES,
    Chain,
    Rank,
    SlotTable,
    Tally,
    Tickets,
    numbers_of,
)


class Standing(enum.IntEnum):
    """What keeps a chain in DRAM; of two, the lower leaves first."""

    OVER = 0  # a finished program or a superseded turn left it: nobody misses it
    AHEAD = 1  # read ahead of a turn that can wait: it takes no other program's room
    LENT = 2  # a running turn has it in VRAM and stores it anew, so it is not lost
    LIVE = 3  # a turn may come back for it


class Worth(NamedTuple):
    """What a chain is worth in DRAM. `rank`: the policy's, among those that are live."""

    standing: Standing
    rank: float = 0.0


AHEAD = Worth(Standing.AHEAD, -math.inf)
_OVER, _LENT = Worth(Standing.OVER), Worth(Standing.LENT)


def live_worth(rank: Rank | None, program: str, last_used: float) -> Worth:
    """What a live chain is worth. Where no policy ranks them, all are worth the same."""
    return Worth(Standing.LIVE, 0.0 if rank is None else rank(program, last_used))


# How many live chains from either end of the least-recently-used order are compared at a time. Both
# ends, because where programs return in turn, the one used last is needed last: with less DRAM than
# KV, evicting the coldest first always misses, and evicting the hottest first keeps what fits.
NUM_CANDIDATES = 16


@dataclass
class Loan:
    """A chain that had `num_blocks` when it was lent to the request `to`. `given`: those that left
    since, and how many turns had used each."""

    num_blocks: int
    to: str
    given: dict[Key, int] = field(default_factory=dict)


class EvictionOrder:
    """Every chain in DRAM, in exactly one of four queues, each least recently used first."""

    def __init__(self, is_stuck: Callable[[Chain], bool]) -> None:
        """`is_stuck`: whether a chain's tail is busy, so that nothing of it can leave."""
        self._is_stuck = is_stuck
        self._done: OrderedDict[Chain, None] = OrderedDict()
        self._superseded: OrderedDict[Chain, None] = OrderedDict()
        self._lent: OrderedDict[Chain, None] = OrderedDict()
        self.loans: dict[str, Loan] = {}  # by program, until that turn has ended
        self._live: OrderedDict[Chain, None] = OrderedDict()
        # A program's chains in `_done`, `_lent` and `_live`, oldest first. It has several where its
        # turns do not continue each other: side requests, forks, conversations that share a name.
        # A chain that was let be is nobody's.
        self._current: dict[str, list[Chain]] = {}

    def __iter__(self) -> Iterator[Chain]:
        return itertools.chain(self._done, self._superseded, self._lent, self._live)

    def __len__(self) -> int:
        return len(self._done) + len(self._superseded) + len(self._lent) + len(self._live)

    @property
    def queues(self) -> Sequence[Any]:
        """The containers that the chains are in, for a caller that takes them apart."""
        return self._done, self._superseded, self._lent, self._live, self._current

    def current(self, program: str) -> Sequence[Chain]:
        """The program's chains that no newer turn superseded, oldest first."""
        return tuple(self._current.get(program, ()))

    def live_of(self, program: str) -> Sequence[Chain]:
        """Those of the program's chains that are live."""
        return [chain for chain in self._current.get(program, ()) if chain in self._live]

    def add(self, chain: Chain) -> None:
        """Add a new live chain, the last to leave among equals."""
        self._live[chain] = None
        self._current.setdefault(chain.program, []).append(chain)

    def use(self, chains: Iterable[Chain], now: float) -> None:
        """A turn has used these chains: they are live and used now."""
        for chain in chains:
            chain.use(now)
            self._done.pop(chain, None)
            self._lent.pop(chain, None)
            self._live[chain] = None
            self._live.move_to_end(chain)

    def demote(self, chains: Iterable[Chain]) -> None:
        """Nobody will continue these chains: they leave before all live ones."""
        for chain in chains:
            self._live.pop(chain, None)
            self._lent.pop(chain, None)
            self._done[chain] = None

    def demote_all(self, program: str) -> None:
        """Nobody will continue any of the program's chains, those that were let be among them."""
        wanted = itertools.chain(self._lent, self._live)
        self.demote([chain for chain in wanted if chain.program == program])

    def lend(self, chain: Chain, request_id: str) -> None:
        """That turn runs and has the live chain's blocks in VRAM, until `take_back` or `use`."""
        del self._live[chain]
        self._lent[chain] = None
        self.loans[chain.program] = Loan(len(chain.tickets), request_id)

    def take_back(self, program: str) -> None:
        """No turn of the program runs alone any more. The one that was lent a chain owes what left
        of it until it has ended."""
        if program not in self.loans:
            return
        for chain in self._current.get(program, ()):
            if self._lent.pop(chain, chain) is None:
                self._live[chain] = None

    def end_loan(self, program: str, request_id: str) -> int:
        """That turn has ended: return how many blocks were lent to it, if some of them left."""
        self.take_back(program)
        loan = self.loans.get(program)
        if loan is None or loan.to != request_id:
            return 0
        del self.loans[program]
        return loan.num_blocks if loan.given else 0

    def supersede(self, chain: Chain) -> None:
        """A newer turn of its program continues this chain."""
        self.remove(chain)
        self._superseded[chain] = None

    def let_be(self, program: str) -> None:
        """The program has too many chains: what happens to the others no longer concerns the one
        used longest ago, which keeps its place in the order."""
        resting = [chain for chain in self._current[program] if chain not in self._lent]
        self._disown(min(resting, key=lambda chain: chain.last_used))

    def remove(self, chain: Chain) -> None:
        for queue in (self._done, self._superseded, self._lent, self._live):
            queue.pop(chain, None)
        self._disown(chain)

    def _disown(self, chain: Chain) -> None:
        chains = self._current.get(chain.program, [])
        if chain in chains:
            chains.remove(chain)
            if not chains:
                del self._current[chain.program]

    def victims(
        self, besides: Chain, rank: Rank | None, only_live: bool = False, is_ahead: bool = False
    ) -> Iterator[tuple[Worth, Chain]]:
        """Return (worth, chain) in the order in which they leave. Without `rank`, live chains are
        worth the same and leave least recently used first. `is_ahead`: `besides` is read ahead, and
        of what is live other chains of its program leave first.

        The caller takes what it can of each chain before it asks for the next, and changes the
        order only once it asks no more. `rank` is called for 2 * NUM_CANDIDATES programs, then for
        one more per live chain yielded, however many there are.
        """
        if rank is None and not is_ahead:
            live = self._by_use(besides)
        else:
            live = self._by_rank(besides, rank, is_ahead)
        if only_live:
            return live
        dead = itertools.chain(self._done, self._superseded)
        lent = zip(itertools.repeat(_LENT), reversed(self._lent))
        return itertools.chain(zip(itertools.repeat(_OVER), dead), lent, live)

    def _by_use(self, besides: Chain) -> Iterator[tuple[Worth, Chain]]:
        equal = Worth(Standing.LIVE)
        for chain in self._live:
            if chain is not besides:
                yield equal, chain

    def _by_rank(
        self, besides: Chain, rank: Rank | None, is_ahead: bool
    ) -> Iterator[tuple[Worth, Chain]]:
        num_unseen = num_live = len(self._live)
        coldest = iter(enumerate(self._live))
        hottest = zip(range(num_live - 1, -1, -1), reversed(self._live), strict=True)
        ends: tuple[Iterator[tuple[int, Chain]], ...] = (coldest, hottest)
        # The place in the order breaks ties.
        window: list[tuple[Standing, float, int, Chain, int]] = []

        def look(end: int) -> None:
            """Let in the next chain from that end; the ends meet in the middle."""
            nonlocal num_unseen
            for place, chain in itertools.islice(ends[end], num_unseen):
                num_unseen -= 1
                if chain is besides or self._is_stuck(chain):
                    continue
                if is_ahead and chain.program == besides.program:
                    worth = AHEAD
                else:
                    own = -math.inf if rank is None else rank(chain.program, chain.last_used)
                    worth = Worth(Standing.LIVE, own)
                heapq.heappush(window, (*worth, place, chain, end))
                return

        for _ in range(NUM_CANDIDATES):
            look(0)
            look(1)
        while window:
            standing, own, _, chain, end = window[0]
            yield Worth(standing, own), chain
            heapq.heappop(window)
            look(end)


# --- which slots ------------------------------------------------------------------------
# Where thousands of programs share a long prompt, their claims on it add up. Beyond this many bytes
# the coldest chains leave. 10^4 programs that share 3,000 blocks fit, and so do 10^7 slots in
# chains of 50 that share nothing; a DRAM of 10^6 blocks takes about as much for keys and columns.
MAX_CLAIM_BYTES = 256 << 20
CHAIN_BYTES = 600  # beside its claims: the object, an array's header, its entries in the order
# A client may send one id for all it does. Every store and load looks at all chains of its program,
# so beyond this many the one used longest ago is looked at no more. It stays live, and leaves by
# its own last use, as what a program left that is forgotten.
MAX_BRANCHES = 64
# How many live chains are searched for tails that are kept below, too, and how many blocks of a
# tail are looked at first. Each further look takes more, so that a tail that is not kept there
# costs little, however long the chain.
MOST_LIVE, FIRST_LOOK = 64, 128


class SlotClaims:
    """All chains. Counts each slot's claims in the table; the caller frees the slots that leave.
    `below`: the memory below (Below, in base.py)."""

    def __init__(self, table: SlotTable, below: Any) -> None:
        self._table = table
        self._below = below
        self._num_claims = 0
        self._superseded: list[tuple[Chain, Tickets]] = []  # by the newest, with what they had
        self.order = EvictionOrder(table.is_stuck)

    @property
    def num_bytes(self) -> int:
        """Bytes that the chains take, without the slots themselves."""
        return self._num_claims * TICKET_BYTES + len(self.order) * CHAIN_BYTES

    def begin(self, present: Numbers, program: str, now: float, num_prompt: int) -> Chain:
        """Begin a chain that claims its `present` slots before anything is evicted. `num_prompt`:
        how many of its blocks its prompt has, 0 if nobody knows."""
        chain = Chain(program, now, self._table.tickets[present], num_prompt)
        self._table.num_chains[present] += 1
        self._num_claims += len(present)
        self._superseded = []
        if current := self.order.current(program):
            self._table.mark(present, True)
            older = self._continued(current, num_prompt)
            for each in older:
                self._supersede(each)
            self._table.mark(present, False)
            if len(current) - len(older) > MAX_BRANCHES:  # without this one: it may be withdrawn
                self.order.let_be(program)
        self.order.add(chain)
        return chain

    def use(self, program: str, last: Tickets, now: float) -> None:
        """A turn of the program loads up to this ticket's slot: those of its chains that have it
        are used now."""
        has_it = [c for c in self.order.current(program) if (c.tickets == last).any()]
        self.order.use(has_it, now)

    def demote(self, program: str, numbers: Numbers, num_prompt: int) -> None:
        """Nobody will continue those of the program's chains that a turn with these slots, -1 where
        a block has none, continues."""
        present = numbers[numbers >= 0]
        self._table.mark(present, True)
        self.order.demote(self._continued(self.order.current(program), num_prompt))
        self._table.mark(present, False)

    def _continued(self, current: Sequence[Chain], num_prompt: int) -> list[Chain]:
        """Those of the chains that the marked one continues: to the end, or, if it does none of
        them, from the end of a shorter prompt on."""
        table = self._table
        whole = [each for each in current if table.is_continued(each.tickets)]
        # Many clients send an answer back without its thinking.
        return whole or [
            each
            for each in current
            if 0 < each.num_prompt < num_prompt
            and table.is_continued(each.tickets[: each.num_prompt])
        ]

    def withdraw(self, chain: Chain) -> None:
        """Undo the newest chain: what it superseded is again as it was."""
        self._claim(chain, NO_TICKETS)
        for older, before in self._superseded:
            self._claim(older, before)
            self.order.remove(older)
            self.order.add(older)

    def _claim(self, chain: Chain, tickets: Tickets) -> None:
        """Let the chain claim `tickets` and no others; some of the old or new slots may be gone."""
        table, before = self._table, chain.tickets
        table.num_chains[numbers_of(before[table.are_there(before)])] -= 1
        table.num_chains[numbers_of(tickets[table.are_there(tickets)])] += 1
        self._num_claims += len(tickets) - len(before)
        chain.claim(tickets)

    def extend(self, chain: Chain, numbers: Numbers) -> None:
        """Let the chain claim these slots, among them some that were not there when it began."""
        self._num_claims += len(numbers) - len(chain.tickets)
        chain.claim(self._table.tickets[numbers])

    def _supersede(self, chain: Chain) -> None:
        """Leave the chain only what the newer, marked chain does not claim."""
        self._superseded.append((chain, chain.tickets))
        self._claim(chain, self._table.unmarked(chain))
        (self.order.supersede if len(chain.tickets) else self.order.remove)(chain)

    def leaving(
        self, chain: Chain, own: Worth, rank: Rank | None, tails_first: bool, num_whole: int = 0
    ) -> Iterator[tuple[Worth, Chain, int]]:
        """Yield (worth, chain, how many of its slots) in the order in which they leave for `chain`,
        which is worth `own`. `num_whole`: chains leave whole, and none leaves unless all that may
        leave free this many slots; 0 where chains may leave in part."""
        order = self._may_leave(chain, own, rank, tails_first)
        return iter(self._enough(order, num_whole)) if num_whole else order

    def _may_leave(
        self, chain: Chain, own: Worth, rank: Rank | None, tails_first: bool
    ) -> Iterator[tuple[Worth, Chain, int]]:
        """Yield what is worth no more than `own`. With `tails_first`, tails that are kept below
        leave before everything else that is live and not lent, even those of a few chains that are
        worth more, unless they are needed soon."""
        order = self.order.victims(chain, rank, is_ahead=own.standing is Standing.AHEAD)
        if tails_first:
            live: list[tuple[Worth, Chain]] = []
            for worth, victim in order:
                if worth.standing not in (Standing.OVER, Standing.LENT):
                    live = [(worth, victim), *itertools.islice(order, MOST_LIVE - 1)]
                    break
                yield worth, victim, len(victim.tickets)
            for worth, victim in live:
                tail, num = self._kept_tail(victim)
                if num and not self._below.stays(victim.program, worth.rank, tail, num):
                    yield worth, victim, num
            order = itertools.chain(live, order)
        for worth, victim in order:
            if worth > own:
                return
            yield worth, victim, len(victim.tickets)

    def _kept_tail(self, chain: Chain) -> tuple[Numbers, int]:
        """The slots at its tail that are kept below, and how many of them no other chain claims."""
        table, num_looked = self._table, FIRST_LOOK
        while True:
            tickets = chain.tickets[-num_looked:]
            there, numbers = table.are_there(tickets), numbers_of(tickets)
            unkept = (there & ~self._below.are_kept(numbers)).nonzero()[0]
            if len(unkept) or len(tickets) == len(chain.tickets):
                break
            num_looked *= 4
        first = int(unkept[-1]) + 1 if len(unkept) else 0
        tail = numbers[first:]
        return tail, int(np.count_nonzero(there[first:] & (table.num_chains[tail] == 1)))

    def _enough(
        self, order: Iterator[tuple[Worth, Chain, int]], num_wanted: int
    ) -> list[tuple[Worth, Chain, int]]:
        """Return the first of those chains that together, as whole chains, free `num_wanted` slots
        that no other chain claims; a chain is skipped if one of the slots it would free is busy.
        Return none if that is not enough."""
        chosen, tally = [], Tally(self._table)
        for worth, chain, _ in order:
            num_free = tally.add(chain)
            if num_free is not None:
                chosen.append((worth, chain, num_free))
                num_wanted -= num_free
            if num_wanted <= 0:
                return chosen
        return []

    def let_go(self, chain: Chain, num_wanted: int | None) -> Iterator[Numbers]:
        """Yield slots that no other chain claims, tail first, `num_wanted` in all, or fewer if a
        busy one comes before that. None: all of them, or none if one is busy. The caller forgets
        them before it looks anything up."""
        is_stuck = False
        if num_wanted is None:
            num_wanted = len(chain.tickets)
            is_stuck = Tally(self._table).add(chain) is None
        while len(chain.tickets) and num_wanted and not is_stuck:
            length, leaving, is_stuck = self._table.tail(chain, num_wanted)
            chain.cut(length)
            self._num_claims -= length
            num_wanted -= len(leaving)
            yield leaving

    def excess(self, besides: Chain, whole: bool) -> Iterator[Numbers]:
        """Yield slots that no other chain claims, from the coldest chains, while there are too many
        bytes; with `whole`, of whole chains."""
        victims: list[Chain] = []
        num_empty = 0
        for _, victim in self.order.victims(besides, None):
            if self.num_bytes - num_empty * CHAIN_BYTES <= MAX_CLAIM_BYTES:
                break
            victims.append(victim)
            num_left = 1
            while num_left and self.num_bytes - num_empty * CHAIN_BYTES > MAX_CLAIM_BYTES:
                num_left = 0
                for leaving in self.let_go(victim, None if whole else 1):
                    num_left += len(leaving)
                    yield leaving
            num_empty += not len(victim.tickets)
        self.drop_empty(victims)

    def drop_empty(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            if not len(chain.tickets):
                self.order.remove(chain)

    def clear(self) -> Sequence[Any]:
        """Drop all claims; the slots' own counts go with the slots. Returns the containers that the
        chains were in, to be taken apart."""
        old, self.order = self.order, EvictionOrder(self._table.is_stuck)
        self._num_claims, self._superseded = 0, []
        return old.queues


# --- how long blocks stay ----------------------------------------------------------------
NUM_PARTS = 32  # parts of the window; each is forgotten as a whole
# Turns end in bursts, so what left within less than this says little about the rate. A lull that
# lasts this long, and as long as a block stays, is the end of the pressure.
LEAST_S = 10.0


class Residence:
    """Slots / rate at which live blocks leave: the mean stay, by Little's law.

    The age of the blocks that leave would mislead: where what is needed last leaves first, they are
    the ones just stored, and blocks that stay are never seen. Only live chains count: what finished
    programs and superseded turns left goes first and shortens no other block's stay. The window is
    one turnover: the time in which as many blocks left as there are slots.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[float, int]] = deque()  # start of part, blocks that left in it
        self._num_left = 0
        self._last = -math.inf
        self._num_slots = 0

    def evicted(self, num_blocks: int, num_slots: int, now: float) -> None:
        """Live blocks left, of `num_slots` in all; called once per store that needed their room."""
        if math.isinf(self.seconds(now)):
            self._parts = deque([(now - LEAST_S, 0)])
            self._num_left = 0
        since, number = self._parts[-1]
        if number * NUM_PARTS < num_slots:
            self._parts[-1] = since, number + num_blocks
        else:
            self._parts.append((now, num_blocks))
        self._num_left += num_blocks
        self._last, self._num_slots = now, num_slots
        while self._num_left - self._parts[0][1] >= num_slots:
            self._num_left -= self._parts.popleft()[1]

    def seconds(self, now: float) -> float:
        """Return the estimate. It is infinite while nothing had to leave, and again once nothing
        has left for as long as a block stays."""
        if not self._num_left:
            return math.inf
        if now - self._last >= max(self._until(self._last), LEAST_S):
            return math.inf
        return self._until(now)

    def _until(self, now: float) -> float:
        span_s = max(now - self._parts[0][0], LEAST_S)
        return self._num_slots * span_s / self._num_left
