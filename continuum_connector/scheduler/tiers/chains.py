"""SlotClaims: which chains claim which slots, and in which order they let go.

A program has one chain per branch, each with its own last use. A chain is superseded, and leaves
before any live chain, once a turn continues it. Nothing else does that: what a turn leaves takes
nothing from a chain that it does not continue.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from continuum_connector.errors import InvariantError
from continuum_connector.scheduler.tiers.base import Below
from continuum_connector.scheduler.tiers.eviction import EvictionOrder, Rank, Standing, Worth
from continuum_connector.scheduler.tiers.slots import (
    NO_TICKETS,
    TICKET_BYTES,
    Chain,
    Numbers,
    SlotTable,
    Tally,
    Tickets,
    numbers_of,
)

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
    """All chains. Counts each slot's claims in the table; the caller frees the slots that leave."""

    def __init__(self, table: SlotTable, below: Below) -> None:
        self._table = table
        self._below = below
        self._num_claims = 0
        self._superseded: list[tuple[Chain, Tickets]] = []  # by the newest, with what they had
        self.order = EvictionOrder(table.is_stuck)

    @property
    def num_bytes(self) -> int:
        """Bytes that the chains take, without the slots themselves."""
        return self._num_claims * TICKET_BYTES + len(self.order) * CHAIN_BYTES

    @property
    def are_too_many(self) -> bool:
        return self.num_bytes > MAX_CLAIM_BYTES

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
            if len(current) - len(older) >= MAX_BRANCHES:
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

    def check(self, used: Numbers, past: Numbers) -> None:
        """Prove that used slots are claimed as often as counted; `past`: slots that no longer
        are."""
        chains = list(self.order)
        claimed = np.concatenate([NO_TICKETS, *(chain.tickets for chain in chains)])
        claims = np.zeros(len(self._table.tickets), np.int64)
        np.add.at(claims, numbers_of(claimed[self._table.are_there(claimed)]), 1)
        claims[past] = self._table.num_chains[past]
        if not (self._table.num_chains == claims).all() or not claims[used].all():
            raise InvariantError(f"claims counted {self._table.num_chains}, found {claims}")
        if any(count > 1 for count in Counter(chains).values()):
            raise InvariantError("a chain is in two queues")
        if not all(len(chain.tickets) for chain in chains):
            raise InvariantError("a chain without slots is still to be evicted")
        if self._num_claims != len(claimed):
            raise InvariantError(f"{self._num_claims} claims counted, {len(claimed)} found")
