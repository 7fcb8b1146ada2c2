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
holds, the shadow is exact (tests/vllm/test_stock.py), unless a block is computed beside a copy of
it that exists: of two copies it does not know which one stock would find next.

Cost: a few dictionary look-ups and slices per turn, and the length of each running turn's table,
none per block; at most one entry per VRAM block. A chain is not kept block by block but as
stretches that were last used by the same turn. Books that do not add up are begun anew.

AgainstStock: what was found of a turn, beside that. Balance: whether pins lose by it.
"""

from __future__ import annotations

import functools
import logging
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

WRONG = (
    "ContinuumConnector: the shadow of stock vLLM's cache did not add up and begins anew; only "
    "what is told against stock, and whether pins end for it, is affected. Please report it"
)
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class AgainstStock:
    """A turn's prompt tokens: those that only we kept, those that stock vLLM would have kept too,
    and those that stock would have kept and we did not."""

    only_ours: int
    stock_too: int
    only_stock: int

    @classmethod
    def of(cls, num_found: int, num_in_stock: int) -> AgainstStock:
        too = min(num_found, num_in_stock)
        return cls(num_found - too, too, num_in_stock - too)

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class Balance:
    """Whether what we keep finds less than stock vLLM would, lately: no pin pays then.

    That is asked only while nobody waits, and hardly anybody did. Then stock would have admitted
    the same turns at the same times; under load it would not, as it computes what it has lost
    (docs/decisions.md). What was lost counts half after HALF_S, so pins are tried again.
    """

    SHARE = 1 / 8  # of VRAM: what may be lost, beyond what was won, up to as much
    HALF_S = 600.0
    MAX_BLOCKED = 0.2  # of the time: more is load

    def __init__(
        self,
        num_tokens: int,
        has_waiting: Callable[[], bool],
        share_blocked: Callable[[float], float],
    ) -> None:
        """`num_tokens`: what VRAM holds. `has_waiting`: whether a turn waits, for whatever.
        `share_blocked`: in how much of the recent time somebody waited for room."""
        self._most = self.SHARE * num_tokens
        self._has_waiting, self._share_blocked = has_waiting, share_blocked
        self._lost, self._since = 0.0, 0.0

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
        return not self._has_waiting() and self._share_blocked(now) < self.MAX_BLOCKED

    def _lately(self, now: float) -> float:
        return self._lost * math.pow(0.5, (now - self._since) / self.HALF_S)


class _Stretch:
    """Consecutive blocks of a chain. `refs`: how many running turns use it; 0: it is in the queue.
    `owner`: the request that computes it. A second copy of blocks that have their place elsewhere
    has no `hashes`; it only takes room."""

    __slots__ = ("hashes", "owner", "refs", "size")

    def __init__(self, hashes: list[bytes], size: int, refs: int = 0, owner: str = "") -> None:
        self.hashes, self.size, self.refs, self.owner = hashes, size, refs, owner


@dataclass
class _Use:
    """What a running turn has of `request`'s chain: its first `hit` blocks found, from there to
    `there` computed again beside a copy that exists, from there to `end` its own. `num_cached`:
    when last looked at."""

    request: Any
    hit: int
    there: int
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
        self._by_first: dict[bytes, _Stretch] = {}
        self._queue: OrderedDict[_Stretch, None] = OrderedDict()
        self._uses: dict[str, _Use] = {}
        self._growing: dict[str, _Use] = {}  # those whose prompts are not all computed
        self._ends: dict[bytes, str] = {}  # the last block of each -> the turn
        self.clear()

    def __len__(self) -> int:
        """Blocks in the queue."""
        return self._num_queued

    def clear(self) -> None:
        """The prefix cache is emptied, or nobody saw what happened to it for a while."""
        for part in (self._by_first, self._queue, self._uses, self._growing, self._ends):
            part.clear()
        self._num_queued = 0
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
        found, there = self._walk(hashes, 0, len(hashes))
        if 0 < there < len(hashes) and self._extend(hashes[there - 1]):
            found, there = self._walk(hashes, 0, len(hashes))
        is_blind = request.skip_reading_prefix_cache  # as with prompt_logprobs
        most = 0 if is_blind else (request.num_tokens - 1) // self._block_size
        hit = max(0, min(self._num_readable(found), most) - self._num_dropped)
        for start, stretch, num in found:
            if start >= hit:
                break
            self._use(self._cut(stretch, min(num, hit - start)))
        use = self._uses[request_id] = _Use(request, hit, there, len(hashes))
        if there < use.end:
            self._add(_Stretch(hashes[there:], use.end - there, 1, request_id))
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
        while num > 0 and self._queue:
            self._has_displaced = True
            stretch = next(iter(self._queue))
            size = min(num, stretch.size)
            if size == stretch.size:
                del self._queue[stretch]
                self._remove(stretch)
            else:
                del stretch.hashes[-size:]
            stretch.size -= size
            self._num_queued -= size
            num -= size

    def _walk(
        self, hashes: Sequence[bytes], start: int, end: int
    ) -> tuple[list[tuple[int, _Stretch, int]], int]:
        """The stretches that begin like hashes[start:end], each with its place and how many of its
        blocks are the same; and where they end."""
        found = []
        while start < end and (stretch := self._by_first.get(hashes[start])) is not None:
            num = _num_same(stretch, hashes, start, end)
            found.append((start, stretch, num))
            start += num
        return found, start

    def _extend(self, last: bytes) -> bool:
        """Add what the running turn whose last block this is has computed since. Whether there was
        any: usually nobody looks for it before the turn has ended."""
        request_id = self._ends.get(last, "")
        use = self._uses.get(request_id)
        if use is None:
            return False
        hashes, begin = use.request.block_hashes, use.end
        end = min(self._num_cached.get(request_id, 0), len(hashes))
        if end <= begin or hashes[begin] in self._by_first:
            return False
        use.end = end
        self._add(_Stretch(hashes[begin:end], end - begin, 1, request_id))
        self._ends[hashes[end - 1]] = self._ends.pop(last)
        return True

    def _num_readable(self, found: Sequence[tuple[int, _Stretch, int]]) -> int:
        """How many blocks a lookup finds: those that a running turn has still to compute end it."""
        end = 0
        for start, stretch, num in found:
            end = start + num
            if stretch.owner in self._growing:
                num_cached = self._num_cached.get(stretch.owner, 0)
                if num_cached < end:
                    return max(start, num_cached)
        return end

    def _cut(self, stretch: _Stretch, size: int) -> _Stretch:
        """Return its first `size` blocks as a stretch of their own; the rest keeps its place."""
        if size == stretch.size:
            return stretch
        head = _Stretch(stretch.hashes[:size], size, stretch.refs, stretch.owner)
        self._by_first[stretch.hashes[0]] = head
        del stretch.hashes[:size]
        stretch.size -= size
        self._add(stretch)
        if not head.refs:  # it leaves the queue at once, whoever cuts it
            self._num_queued -= size
        return head

    def _use(self, stretch: _Stretch) -> None:
        """A running turn has found it."""
        if stretch.refs:
            self._num_shared += stretch.size
        elif stretch in self._queue:
            del self._queue[stretch]
            self._num_queued -= stretch.size
        stretch.refs += 1

    def _add(self, stretch: _Stretch) -> None:
        """It can be found from now on. What a lookup found in its place is a second copy then: it
        lay behind blocks that had been displaced and computed again."""
        other = self._by_first.get(stretch.hashes[0], stretch)
        self._by_first[stretch.hashes[0]] = stretch
        if other is not stretch:
            other.hashes = []
            self._num_shared -= max(0, other.refs - 1) * other.size

    def _remove(self, stretch: _Stretch) -> None:
        if stretch.hashes and self._by_first.get(stretch.hashes[0]) is stretch:
            del self._by_first[stretch.hashes[0]]

    def _end(self, request_id: str, num_cached: int) -> None:
        """The turn's blocks that have a hash go to the end of the queue, tail first. Those that
        other turns use stay; what it has a second copy of keeps the newer place."""
        use = self._uses.pop(request_id, None)
        self._growing.pop(request_id, None)
        if use is None:
            return
        hashes = use.request.block_hashes
        if use.end and self._ends.get(hashes[use.end - 1]) == request_id:
            del self._ends[hashes[use.end - 1]]
        # What it found in stock is its own there, whatever our server had of it when it ended.
        num_cached = min(max(num_cached, use.hit), len(hashes))
        if num_cached < use.end:
            self._drop(hashes, max(use.there, num_cached), use.end)
        left: list[_Stretch] = []
        begin = place = 0  # all from `begin` to `place` goes to the queue as one stretch
        sections = ((use.hit, True), (use.there, False), (use.end, True), (num_cached, False))
        for section, is_its_own in sections:
            end = min(section, num_cached)
            while place < end:
                stretch = self._by_first.get(hashes[place])
                if stretch is None:
                    place = end
                    continue
                num = _num_same(stretch, hashes, place, end)
                stays = self._leave(stretch) if is_its_own else self._double(stretch, num)
                if stays:
                    self._gather(left, hashes[begin:place])
                    begin = place + num
                    if not is_its_own:
                        left.append(_Stretch([], num))
                place += num
        self._gather(left, hashes[begin:num_cached])
        for stretch in reversed(left):
            self._queue[stretch] = None
            self._num_queued += stretch.size
        is_idle = not self._uses and (self._num_shared or len(self._by_first) > len(self._queue))
        if is_idle or len(self._by_first) > self._num_blocks:
            self.clear()  # the books do not add up

    def _leave(self, stretch: _Stretch) -> bool:
        """A turn that uses it ends. Whether others use it; if not, it is forgotten."""
        stretch.refs -= 1
        if stretch.refs:
            self._num_shared -= stretch.size
            return True
        self._remove(stretch)
        return False

    def _double(self, stretch: _Stretch, num: int) -> bool:
        """A turn ends that has copies of its first `num` blocks. Whether running turns use it; if
        not, the turn's copies are the ones to be found from now on."""
        if stretch.refs:
            return True
        head = self._cut(stretch, num)  # the rest stays as it is
        self._remove(head)
        if head is stretch:
            head.hashes = []
        return False

    def _gather(self, left: list[_Stretch], hashes: list[bytes]) -> None:
        if hashes:
            stretch = _Stretch(hashes, len(hashes))
            self._add(stretch)
            left.append(stretch)

    def _drop(self, hashes: Sequence[bytes], start: int, end: int) -> None:
        """Forget what a turn that ends early was to compute from `start` to `end`."""
        found, _ = self._walk(hashes, 0, end)
        for place, stretch, num in found:
            if place + num <= start:
                continue
            if place < start:
                self._cut(stretch, start - place)
            if stretch.refs > 1:  # others use it
                self._leave(stretch)
            else:
                self._remove(stretch)


def _num_same(stretch: _Stretch, hashes: Sequence[bytes], start: int, end: int) -> int:
    """How many of its blocks are those of hashes[start:end]; the first one is. A block's hash
    covers all before it."""
    own = stretch.hashes
    num = min(stretch.size, end - start)
    if own[num - 1] == hashes[start + num - 1]:
        return num
    return 1 + bisect_left(range(1, num), True, key=lambda n: own[n] != hashes[start + n])
