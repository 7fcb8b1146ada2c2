"""EvictionOrder: which chains leave DRAM before which others.

What finished programs left goes first, then what newer turns of their programs superseded, each
oldest first; then chains that are lent, because a running turn has their blocks
in VRAM and will store them anew, the latest first; then live chains by worth, which the caller
provides.

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

from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.slots import Chain


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


# Program, and when a chain of it was last used -> its rank among those that are live.
Rank = Callable[[str, float], float]

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
