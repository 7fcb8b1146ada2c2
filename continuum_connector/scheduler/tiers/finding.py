"""Finder: how much of a waiting turn's prompt is in DRAM.

vLLM asks in every step about each turn that it cannot admit, while other turns' stores settle and
blocks leave. So the Finder remembers what it found. With one group of full attention, it looks for
new blocks from where the last look ended. For other models, vLLM's own lookup, which walks the
whole prompt, is asked again only when a block of that very prompt has come. A block that left
matters only if it was among those found.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from continuum_connector.messages import BlockIds
from continuum_connector.scheduler.kv_groups import FULL, Key, KvGroup, KvGroups, block_key
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import NO_TICKETS, Tickets

# Turns whose slots are remembered, 8 bytes per slot: vLLM asks about few turns in one step.
MAX_REMEMBERED = 64
MAX_ARRIVALS = 256  # settled stores; a turn not asked about during more of them looks anew
_FIRST_LOOK = 16  # blocks; then twice as many each time, so that a miss costs little
# If a load would get blocks that DRAM lacks, a shorter hit is looked up, at most so often.
_MAX_LOOKUPS = 4


@dataclass(eq=False, slots=True)
class _Promise:
    """Tokens [start, hit) are in DRAM, as of these counts of the index and of stores."""

    start: int
    hit: int
    version: int
    num_lost: int
    num_arrivals: int = 0


class _Look(Protocol):
    """Finds where the hit that begins at `start` ends, and which blocks of the request to load."""

    def hit(self, request: Any, start: int, known: _Promise | None) -> int: ...
    def slots(
        self, request: Any, block_ids: Sequence[Sequence[int]], start: int, hit: int
    ) -> tuple[BlockIds, Tickets]: ...


class Finder:
    """What DRAM has of each turn that was asked about and has not been loaded since."""

    def __init__(self, index: HostIndex, groups: KvGroups) -> None:
        self._index = index
        self._promises: dict[str, _Promise] = {}
        self._tickets = Remembered()
        self._epoch = index.num_epochs  # in which the tickets were found
        self._arrivals = Arrivals(groups)
        # Requests whose promise was cut to where no hit ends: the same one would be made for ever.
        self._cut: set[str] = set()
        self._look: _Look
        if groups.lookup is None:
            self._look = EveryBlock(index, groups, self._tickets)
        else:
            self._look = ByRule(index, groups, self._tickets, self._arrivals)

    def __iter__(self) -> Iterator[str]:
        return iter(self._promises)

    def came(self, first_end: int, first_key: Key) -> None:
        """A store has settled; `first_...`: of its block that comes first in the chain."""
        self._arrivals.add(first_end, first_key)

    def find(self, request: Any, num_vram_tokens: int) -> int:
        """Return how many tokens beyond `num_vram_tokens` a load could bring back."""
        index, start = self._index, num_vram_tokens
        self._follow_epoch()
        known = self._promises.get(request.request_id)
        if known is None or known.version != index.version or known.start != start:
            if request.request_id in self._cut:
                return 0
            hit = self._look.hit(request, start, known)
            known = _Promise(start, hit, index.version, index.num_lost, self._arrivals.num)
            self._promises[request.request_id] = known
        return known.hit - start

    def start_of(self, request_id: str) -> int:
        """Where the load begins that the request was promised, in tokens."""
        return self._promises[request_id].start

    def take(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[BlockIds, Tickets | None]:
        """Return, once, what was promised for the request's first `num_tokens`: which of its VRAM
        blocks to load, and from which slots; None if one of those slots has gone since."""
        self._follow_epoch()
        promise = self._promises.pop(request.request_id)
        start, hit = promise.start, min(promise.hit, promise.start + num_tokens)
        blocks, tickets = self._look.slots(request, block_ids, start, hit)
        if self._index.still_ready(tickets) == len(blocks):
            return blocks, tickets
        if hit < promise.hit:
            self._cut.add(request.request_id)
        return blocks, None

    def _follow_epoch(self) -> None:
        """Drop slots found in another epoch. A request that was promised some still takes its
        promise, and gets nothing. What was not found may be there: an epoch may have come back."""
        if self._epoch != self._index.num_epochs:
            self._epoch = self._index.num_epochs
            self._tickets.clear()
            self._arrivals.all_may_have()

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._promises.pop(request_id, None)
        self._tickets.pop(request_id, None)
        self._cut.discard(request_id)


class Remembered(OrderedDict[str, Tickets]):
    """The slots found for the requests that were asked about last."""

    def put(self, request_id: str, tickets: Tickets) -> None:
        self[request_id] = tickets
        if len(self) > MAX_REMEMBERED:
            self.popitem(last=False)


class Arrivals:
    """The first block of each of the stores that settled last. A block's hash covers all before it,
    so a prompt that lacks this block has nothing of that store."""

    def __init__(self, groups: KvGroups) -> None:
        self.num = 0
        self._unit = groups.hash_size
        # A block in which a hit ended may have been filled since, and then has a later hash.
        self._span = groups.scheduler_size // groups.hash_size
        self._firsts: deque[tuple[int, bytes]] = deque(maxlen=MAX_ARRIVALS)

    def add(self, end: int, key: Key) -> None:
        self.num += 1
        self._firsts.append((end // self._unit - 1, key[: -len(_SUFFIX)]))

    def all_may_have(self) -> None:
        """For any prompt, something may have come."""
        self.num += 1
        self._firsts.clear()

    def concern(self, hashes: Sequence[bytes], since: int) -> bool:
        """Whether an arrival after the first `since` may belong to a prompt with these hashes."""
        num_new = self.num - since
        if num_new > len(self._firsts):
            return True
        new = (self._firsts[-number] for number in range(1, num_new + 1))
        return any(first in hashes[place : place + self._span] for place, first in new)


_SUFFIX = block_key(b"", 0)


class EveryBlock:
    """One group of full attention: a hit needs every block from its first, so looks can resume."""

    def __init__(self, index: HostIndex, groups: KvGroups, remembered: Remembered) -> None:
        self._index = index
        self._groups = groups
        self._tickets = remembered

    def hit(self, request: Any, start: int, known: _Promise | None) -> int:
        """Continue from where the last look ended, or from the first block that has left."""
        size, index, hashes = self._groups.hash_size, self._index, request.block_hashes
        first, end = start // size, self._groups.last_end(request.num_tokens) // size
        tickets = self._tickets.pop(request.request_id, None)
        if tickets is None or known is None or known.start != start:
            tickets = NO_TICKETS
        elif known.num_lost != index.num_lost:
            tickets = tickets[: index.still_ready(tickets)]
        hit, end, length = first + len(tickets), min(end, len(hashes)), _FIRST_LOOK
        if hit >= end or hashes[hit] + _SUFFIX not in index:  # most prompts: nothing is there
            self._tickets.put(request.request_id, tickets)
            return hit * size
        pieces = [tickets]
        while hit < end:
            upto = min(end, hit + length)
            piece = index.find(self._keys(hashes, hit, upto))
            pieces.append(piece)
            hit += len(piece)
            if hit < upto:
                break
            length *= 2
        self._tickets.put(request.request_id, np.concatenate(pieces))
        return hit * size

    def slots(
        self, request: Any, block_ids: Sequence[Sequence[int]], start: int, hit: int
    ) -> tuple[BlockIds, Tickets]:
        size = self._groups.hash_size
        first, last = start // size, hit // size
        blocks = np.array(block_ids[0][first:last], dtype=np.int32)
        tickets = self._tickets.pop(request.request_id, None)
        if tickets is None:  # too many other requests were asked about since
            tickets = self._index.find(self._keys(request.block_hashes, first, last))
        return blocks, tickets[: len(blocks)]

    def _keys(self, hashes: Sequence[bytes], first: int, last: int) -> list[Key]:
        return [block_hash + _SUFFIX for block_hash in hashes[first:last]]


class ByRule:
    """Any other model: vLLM's own lookup says where a hit ends and which blocks a load gets."""

    def __init__(
        self, index: HostIndex, groups: KvGroups, remembered: Remembered, arrivals: Arrivals
    ) -> None:
        assert groups.lookup is not None
        self._lookup = groups.lookup
        self._index = index
        self._groups = groups
        self._tickets = remembered
        self._arrivals = arrivals

    def hit(self, request: Any, start: int, known: _Promise | None) -> int:
        if known is not None and known.start == start and self._stands(request, known):
            return known.hit
        hit, hashes, index = request.num_tokens, request.block_hashes, self._index
        for _ in range(_MAX_LOOKUPS):
            hit = self._lookup.longest_hit(hashes, start, hit - 1, index.is_ready)
            if hit == start:
                break
            keys = self._needed(hashes, start, hit)
            tickets = index.find(keys)
            if len(tickets) == len(keys):
                self._tickets.put(request.request_id, tickets)
                return hit
        self._tickets.put(request.request_id, NO_TICKETS)
        return start

    def slots(
        self, request: Any, block_ids: Sequence[Sequence[int]], start: int, hit: int
    ) -> tuple[BlockIds, Tickets]:
        self._tickets.pop(request.request_id, None)
        keys: list[Key] = []
        blocks: list[int] = []
        for group in self._groups:
            first, last = start // group.block_size, -(-hit // group.block_size)
            ids = block_ids[group.index][first:last]
            named = self._keys(request.block_hashes, group, first, hit)
            keys += [key for key, block_id in zip(named, ids, strict=True) if block_id]
            blocks += filter(None, ids)
        return np.array(blocks, dtype=np.int32), self._index.find(keys)

    def _stands(self, request: Any, known: _Promise) -> bool:
        """Whether another look would find the same."""
        if self._arrivals.concern(request.block_hashes, known.num_arrivals):
            return False
        if known.hit == known.start or known.num_lost == self._index.num_lost:
            return True
        tickets = self._tickets.get(request.request_id)
        return tickets is not None and self._index.still_ready(tickets) == len(tickets)

    def _needed(self, hashes: Sequence[bytes], start: int, hit: int) -> list[Key]:
        """Keys of the blocks that a load of those tokens gets; vLLM's lookup may need fewer."""
        keys: list[Key] = []
        for group in self._groups:
            first = max(start, self._lookup.first_read(group.index, hit)) // group.block_size
            keys += self._keys(hashes, group, first, hit)
        return keys

    def _keys(self, hashes: Sequence[bytes], group: KvGroup, first: int, hit: int) -> list[Key]:
        """The keys of the group's blocks from index `first` to where the hit ends. A block's key
        has the hash at the block's end; if the hit ends inside the block, the hash at the hit's
        end. With full attention any block that continues with the same tokens will do."""
        size, unit, suffix = group.block_size, self._groups.hash_size, block_key(b"", group.index)
        ends = range((first + 1) * size, hit + 1, size)
        keys = [hashes[end // unit - 1] + suffix for end in ends]
        if hit % size:
            longest = (hit // size + 1) * size // unit if group.kind == FULL else hit // unit
            tails = [each + suffix for each in hashes[hit // unit - 1 : longest]]
            keys.append(next(filter(self._index.is_ready, tails), tails[0]))
        return keys
