"""StockCache: what stock vLLM's prefix cache would hold by now, had it served the same turns.

A token that we found is no saving if stock vLLM would have found it, too. Where it lay does not
tell: stock might have kept in VRAM what we found in DRAM, and a pin may have kept what nobody would
have displaced. So this is a shadow of stock's BlockPool (vLLM v1/core/block_pool.py). There, a turn
that ends puts its blocks at the end of a queue, tail first; whoever needs a block takes an empty
one, then the head of the queue; a turn that finds its prefix takes it out of the queue. Running
turns have the rest of the blocks, so the queue is what fits beside them: that is looked at whenever
a turn is admitted, ends or finds no block, and between those moments running turns only grow.

Assumed is that stock would have admitted the same turns in the same order at the same times. It
would not: it computes what it has lost, and then everybody waits. One group of full attention,
whose hits need every block before their end; for other models the answer is not known. Where that
holds, the shadow is exact (tests/vllm/test_stock.py); of blocks that were computed more than once
stock finds the copy that was computed first. Only where a turn is preempted beside such copies, or
running turns give the same answer, a block may be missed or be one too many.

Cost: a few dictionary look-ups and slices per turn, and the length of each running turn's table,
none per block; at most one entry per VRAM block. A chain is not kept block by block but as
stretches that were last used by the same turn. Books that do not add up are begun anew.

Balance: whether pins lose by it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from continuum_connector.costs import TIME_CONSTANT_S, Level
from continuum_connector.scheduler.queue import LazyHeap

WRONG = (
    "ContinuumConnector: the shadow of stock vLLM's cache did not add up and begins anew; only "
    "what is told against stock, and whether pins end for it, is affected. Please report it"
)
logger = logging.getLogger(f"vllm.{__name__}")


class Balance:
    """Whether what we keep finds less than stock vLLM would, lately: no pin pays then.

    That is asked only where there was hardly any load. Then stock would have admitted the same
    turns at the same times; under load it would not, as it computes what it has lost
    (docs/decisions.md). What was lost counts half after HALF_S, so pins are tried again.
    """

    SHARE = 1 / 8  # of VRAM: what may be lost, beyond what was won, up to as much
    HALF_S = 600.0
    MAX_LOADED = 1 / 20  # of the time

    def __init__(self, num_tokens: int, has_load: Callable[[], bool]) -> None:
        """`num_tokens`: what VRAM holds. `has_load`: whether a turn waits that would on stock vLLM,
        too."""
        self._most = self.SHARE * num_tokens
        self._has_load = has_load
        self._load = Level(TIME_CONSTANT_S)
        self._lost, self._since = 0.0, 0.0

    def look(self, now: float) -> None:
        """A turn has ended. As long as there is load, one does so again and again."""
        self._load.set(float(self._has_load()), now)

    def pins_lose(self, now: float) -> bool:
        is_much = self._lost > self._most and self._lately(now) > self._most
        return is_much and self._is_quiet(now)

    def lost(self, num_tokens: int, now: float) -> bool:
        """A turn found so many tokens less than stock would have (below 0: more). Return whether
        that is another loss where too much was lost."""
        if not num_tokens or not self._is_quiet(now):
            return False
        self._lost = min(max(self._lately(now) + num_tokens, -self._most), 2 * self._most)
        self._since = now
        return num_tokens > 0 and self._lost > self._most

    def _is_quiet(self, now: float) -> bool:
        return not self._has_load() and self._load.mean(now) < self.MAX_LOADED

    def _lately(self, now: float) -> float:
        return self._lost * math.pow(0.5, (now - self._since) / self.HALF_S)


class _Stretch:
    """Consecutive blocks of a chain, from its block number `start` on. `users`: the running turns
    that have them; none: it is in the queue, since the turn number `freed` ended. `owner`: the
    request that computed it."""

    __slots__ = ("freed", "hashes", "owner", "start", "users")

    def __init__(self, hashes: list[bytes], start: int, users: set[str], owner: str) -> None:
        self.hashes, self.start, self.users, self.owner = hashes, start, users, owner
        self.freed = 0

    @property
    def place(self) -> tuple[int, int]:
        """In the queue: of what a turn leaves the tail goes first."""
        return self.freed, -self.start

    def split(self, size: int) -> _Stretch:
        """Keep the first `size` blocks; return the others."""
        tail = _Stretch(self.hashes[size:], self.start + size, set(self.users), self.owner)
        tail.freed = self.freed
        del self.hashes[size:]
        return tail


@dataclass
class _Use:
    """What a running turn has of `request`'s chain: its first `hit` blocks found, from there to
    `end` its own. `num_cached`: when last looked at."""

    request: Any
    hit: int
    end: int
    num_cached: int = 0


class UnknownStock:
    """Of a server for which nobody can say what stock would have kept."""

    def admitted(self, request: Any, num_vram_tokens: int) -> int | None:
        return None

    def look(self) -> None:
        pass

    def preempted(self, request_id: str) -> None:
        pass

    def finished(self, request: Any) -> None:
        pass

    def clear(self) -> None:
        pass


def _cautious(method: Callable[..., Any]) -> Callable[..., Any]:
    """A mistake costs no more than the books: they are asked inside the engine's step, where an
    exception would end the server."""

    @functools.wraps(method)
    def ask(self: StockCache, *what: Any) -> Any:
        try:
            return method(self, *what)
        except Exception:
            if not self.has_warned:
                self.has_warned = True
                logger.warning(WRONG, exc_info=True)
            self.clear()
            return None

    return ask


class StockCache(UnknownStock):
    """See the module. Blocks are counted in `block_size` tokens. `tables`: the blocks of each turn
    that has any; `num_cached`: how many of them have their hash, from the first on; `num_dropped`:
    how many blocks a lookup drops for draft models."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tables: Mapping[str, Sized],
        num_cached: Mapping[str, int],
        num_dropped: int = 0,
    ) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._tables, self._num_cached, self._num_dropped = tables, num_cached, num_dropped
        self.has_warned = False
        # By the first block: the stretches of the same blocks, in the order in which their blocks
        # were computed. Stock finds the first; a turn that finds none, or may not, adds one.
        self._copies: dict[bytes, list[_Stretch]] = {}
        self._queue: LazyHeap[_Stretch] = LazyHeap()
        self._uses: dict[str, _Use] = {}
        self._growing: dict[str, _Use] = {}  # those whose prompts are not all computed
        self._ends: dict[bytes, str] = {}  # the last block of each -> the turn
        self.clear()

    def __len__(self) -> int:
        """Blocks in the queue."""
        return self._num_queued

    def clear(self) -> None:
        """The prefix cache is emptied, or nobody saw what happened to it for a while."""
        for part in (self._copies, self._uses, self._growing, self._ends):
            part.clear()
        self._queue = LazyHeap()
        self._num_queued = self._num_ended = 0
        self._num_shared = 0  # by how much the tables together exceed the blocks in them
        self._has_displaced = False

    # --- what happens to turns --------------------------------------------------------
    @_cautious
    def admitted(self, request: Any, num_vram_tokens: int) -> int:
        """The turn has just got its blocks. Return how many of its tokens stock would have found.

        `num_vram_tokens`: what it found in VRAM. As long as stock would have displaced nothing
        since the last `clear`, it has these, too.
        """
        request_id, hashes = request.request_id, request.block_hashes
        self._make_fit(but=request_id)
        found, there = self._look_up(hashes)
        if 0 < there < len(hashes) and self._extend(hashes[there - 1]):
            found, there = self._look_up(hashes)
        is_blind = request.skip_reading_prefix_cache  # as with prompt_logprobs
        most = 0 if is_blind else (request.num_tokens - 1) // self._block_size
        hit = max(0, min(there, most) - self._num_dropped)
        for copies, stretch, num in found:
            if stretch.start >= hit:
                break
            num = min(num, hit - stretch.start)
            if num < len(stretch.hashes):
                self._cut(copies, num)
            self._use(stretch, request_id)
        use = self._uses[request_id] = _Use(request, hit, len(hashes))
        if hit < use.end:
            self._put([_Stretch(hashes[hit:], hit, {request_id}, request_id)])
            self._growing[request_id] = use
        if hashes:
            self._ends[hashes[-1]] = request_id
        num_tokens = hit * self._block_size
        return num_tokens if self._has_displaced else max(num_tokens, num_vram_tokens)

    @_cautious
    def look(self) -> None:
        """A running turn finds no block, and one may be preempted."""
        self._make_fit()
        for request_id, use in list(self._growing.items()):
            if not self._tables.get(request_id):
                continue  # preempted meanwhile
            use.num_cached = self._num_cached.get(request_id, 0)
            if use.num_cached >= use.end:
                del self._growing[request_id]

    @_cautious
    def preempted(self, request_id: str) -> None:
        """The turn has lost its blocks; all but its last token had been computed, unless its prompt
        was under way."""
        use = self._uses.get(request_id)
        if use is not None:
            num_cached = use.num_cached
            if request_id not in self._growing:
                num_cached = max(num_cached, (use.request.num_tokens - 1) // self._block_size)
            self._end(request_id, num_cached)

    @_cautious
    def finished(self, request: Any) -> None:
        """The turn is over, and is about to give its blocks back."""
        self._make_fit()
        request_id = request.request_id
        self._end(request_id, self._num_cached.get(request_id, 0))

    # --- parts ------------------------------------------------------------------------
    def _make_fit(self, but: str = "") -> None:
        """Displace what does not fit beside the blocks in the tables, `but` for that turn's."""
        num_in_tables = sum(map(len, self._tables.values())) - len(self._tables.get(but, ()))
        num = self._num_queued - (self._num_blocks - (num_in_tables - self._num_shared))
        while num > 0 and (entry := self._queue.first()):
            self._has_displaced = True
            stretch = entry[1]
            size = min(num, len(stretch.hashes))
            if size == len(stretch.hashes):
                self._queue.discard(stretch)
                self._remove(stretch)
            else:
                copies = self._copies[stretch.hashes[0]]
                if len(copies) > 1:
                    self._cut(copies, len(stretch.hashes) - size)
                    continue  # the tail is first in the queue now
                del stretch.hashes[-size:]
            self._num_queued -= size
            num -= size

    def _look_up(
        self, hashes: Sequence[bytes]
    ) -> tuple[list[tuple[list[_Stretch], _Stretch, int]], int]:
        """The stretches that a lookup finds, each with its copies and how many of its blocks are
        found; and where they end: where nobody has the next block, or has computed it."""
        found, place = [], 0
        while place < len(hashes) and (copies := self._copies.get(hashes[place])) is not None:
            num_same = _num_same(copies[0].hashes, hashes, place)
            stretch, num = copies[0], num_same
            if stretch.owner in self._growing:
                stretch, num = self._most_computed(copies)
                num = min(num, num_same)
            if num:
                found.append((copies, stretch, num))
                place += num
            if num < num_same:
                break
        return found, place

    def _most_computed(self, copies: Sequence[_Stretch]) -> tuple[_Stretch, int]:
        """The first that has all of its blocks, or else most; and how many: a running turn may have
        to compute the others."""
        found, most = copies[0], 0
        for stretch in copies:
            num = len(stretch.hashes)
            if stretch.owner in self._growing:
                num_cached = self._num_cached.get(stretch.owner, 0)
                num = min(max(0, num_cached - stretch.start), num)
            if num > most:
                found, most = stretch, num
            if num == len(stretch.hashes):
                break
        return found, most

    def _extend(self, last: bytes) -> bool:
        """Add what the running turn whose last block this is has computed since. Whether there was
        any: usually nobody looks for it before the turn has ended."""
        request_id = self._ends.get(last, "")
        use = self._uses.get(request_id)
        if use is None:
            return False
        hashes, begin = use.request.block_hashes, use.end
        end = min(self._num_cached.get(request_id, 0), len(hashes))
        if end <= begin:
            return False
        use.end = end
        self._put([_Stretch(hashes[begin:end], begin, {request_id}, request_id)])
        self._ends[hashes[end - 1]] = self._ends.pop(last)
        return True

    def _put(self, copies: list[_Stretch]) -> None:
        """They can be found from now on, behind those of the same blocks that are there. All of
        these are cut alike."""
        while copies:
            others = self._copies.setdefault(copies[0].hashes[0], copies)
            if others is copies:
                return
            num = _num_same(others[0].hashes, copies[0].hashes, 0)
            self._cut(others, num)
            tails = self._split(copies, num)
            others += copies
            copies = tails

    def _cut(self, copies: list[_Stretch], size: int) -> None:
        """Cut them behind their first `size` blocks. All keep their place in the queue."""
        self._put(self._split(copies, size))

    def _split(self, copies: list[_Stretch], size: int) -> list[_Stretch]:
        if size == len(copies[0].hashes):
            return []
        tails = [each.split(size) for each in copies]
        for tail in tails:
            if not tail.users:
                self._queue.push(tail.place, tail)
        return tails

    def _use(self, stretch: _Stretch, request_id: str) -> None:
        """A running turn has found it."""
        if stretch.users:
            self._num_shared += len(stretch.hashes)
        else:
            self._queue.discard(stretch)
            self._num_queued -= len(stretch.hashes)
        stretch.users.add(request_id)

    def _remove(self, stretch: _Stretch) -> None:
        copies = self._copies[stretch.hashes[0]]
        copies.remove(stretch)
        if not copies:
            del self._copies[stretch.hashes[0]]

    def _end(self, request_id: str, num_cached: int) -> None:
        """The turn's blocks that have a hash go to the end of the queue, tail first; those that
        other turns use stay."""
        use = self._uses.pop(request_id, None)
        self._growing.pop(request_id, None)
        if use is None:
            return
        hashes = use.request.block_hashes
        if use.end and self._ends.get(hashes[use.end - 1]) == request_id:
            del self._ends[hashes[use.end - 1]]
        # What it found in stock is its own there, whatever our server had of it when it ended.
        num_cached = min(max(num_cached, use.hit), len(hashes))
        if use.end < num_cached:
            answer = hashes[use.end : num_cached]
            self._put([_Stretch(answer, use.end, {request_id}, request_id)])
        place = 0
        left: list[_Stretch] = []
        while place < max(use.end, num_cached):
            copies = self._copies[hashes[place]]
            # What it found is the first; of what it computed it mostly has the last.
            at_ends = itertools.chain(copies[:1], reversed(copies))
            stretch = next(each for each in at_ends if request_id in each.users)
            if place < num_cached < place + len(stretch.hashes):
                self._cut(copies, num_cached - place)
            size = len(stretch.hashes)
            stretch.users.remove(request_id)
            if stretch.users:
                self._num_shared -= size
            elif place >= num_cached:
                self._remove(stretch)  # it was never computed
            else:
                self._gather(left, stretch, len(copies))
            place += size
        self._num_ended += 1
        for stretch in left:
            stretch.freed = self._num_ended
            self._queue.push(stretch.place, stretch)
            self._num_queued += len(stretch.hashes)
        is_idle = not self._uses and (self._num_shared or len(self._copies) > len(self._queue))
        if is_idle or len(self._copies) > self._num_blocks:
            self.clear()  # the books do not add up

    def _gather(self, left: list[_Stretch], stretch: _Stretch, num_copies: int) -> None:
        """A turn leaves it: it becomes one with what the turn left before it, unless there are
        copies of either, which have their own places in the queue."""
        if left and num_copies == 1:
            before = left[-1]
            follows = before.start + len(before.hashes) == stretch.start
            if follows and len(self._copies[before.hashes[0]]) == 1:
                self._remove(stretch)
                before.hashes += stretch.hashes
                return
        left.append(stretch)


def _num_same(own: Sequence[bytes], hashes: Sequence[bytes], start: int) -> int:
    """How many of `own` are those of `hashes` from `start` on; the first one is. A block's hash
    covers all before it."""
    num = min(len(own), len(hashes) - start)
    if own[num - 1] == hashes[start + num - 1]:
        return num
    return 1 + bisect_left(range(1, num), True, key=lambda n: own[n] != hashes[start + n])
