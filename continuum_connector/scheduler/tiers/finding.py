"""Finder: how much of a waiting turn's prompt is in DRAM.

vLLM asks in every step for each turn that it cannot admit, while stores of others settle and
blocks leave. So what was found is remembered: a block that came is looked for where the last
look ended, and one that left counts only if it was among those found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from continuum_connector.messages import BlockIds
from continuum_connector.scheduler.kv_groups import Key, KvGroups, block_key
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import NO_TICKETS, Tickets

# Turns whose slots are remembered, 8 bytes each: few are asked for in one step.
MAX_REMEMBERED = 64
_FIRST_LOOK = 16  # blocks; then twice as many each time, so that a miss costs little


@dataclass(eq=False, slots=True)
class _Promise:
    """Blocks [start, hit) are in DRAM, as of these counts of the index."""

    start: int
    hit: int
    version: int
    num_lost: int


class Finder:
    """What DRAM has of each turn that was asked for and has not been loaded since."""

    def __init__(self, index: HostIndex, groups: KvGroups) -> None:
        self._index = index
        self._groups = groups
        # Without windows a hit needs every block from its first, so it can be resumed.
        self._is_full = groups.num_full == len(groups)
        self._suffixes = [block_key(b"", group.index) for group in groups]
        self._promises: dict[str, _Promise] = {}
        self._tickets: OrderedDict[str, Tickets] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._promises)

    def find(self, request: Any, num_vram_tokens: int) -> int:
        """Return how many tokens beyond `num_vram_tokens` a load could bring back."""
        size, index = self._groups.hash_size, self._index
        start = num_vram_tokens // size
        known = self._promises.get(request.request_id)
        if known is None or known.version != index.version or known.start != start:
            end, hashes = self._groups.last_end(request.num_tokens), request.block_hashes
            if self._is_full:
                hit = self._resume(request, start, end // size, known)
            else:
                hit = self._groups.longest_hit(hashes, start * size, end, index.is_ready) // size
            known = _Promise(start, hit, index.version, index.num_lost)
            self._promises[request.request_id] = known
        return (known.hit - start) * size

    def take(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[BlockIds, Tickets | None]:
        """Return what was promised for the first `num_tokens` of it, once: which VRAM blocks of
        the request's to load, and from which slots; None where one of those has gone since."""
        promise = self._promises.pop(request.request_id)
        tickets = self._tickets.pop(request.request_id, None)
        hashes, start = request.block_hashes, promise.start
        hit = min(promise.hit, start + num_tokens // self._groups.hash_size)
        if self._is_full:
            blocks = np.array([ids[start:hit] for ids in block_ids], dtype=np.int32).T.ravel()
            if tickets is None:  # too many others were asked for since
                tickets = self._index.find(self._keys(hashes, start, hit))
        else:
            keys, blocks = self._windows(hashes, block_ids, start, hit)
            tickets = self._index.find(keys)
        tickets = tickets[: len(blocks)]
        is_there = self._index.still_ready(tickets) == len(blocks)
        return blocks, tickets if is_there else None

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._promises.pop(request_id, None)
        self._tickets.pop(request_id, None)

    # --- parts ------------------------------------------------------------------------
    def _resume(self, request: Any, start: int, end: int, known: _Promise | None) -> int:
        """Look on from where the last look ended, or from the first block that has left."""
        tickets = self._tickets.pop(request.request_id, NO_TICKETS)
        if known is None or known.start != start:
            tickets = NO_TICKETS
        elif known.num_lost != self._index.num_lost:
            tickets = tickets[: self._index.still_ready(tickets)]
        width, length = len(self._suffixes), _FIRST_LOOK
        hit = start + len(tickets) // width
        end = min(end, len(request.block_hashes))
        pieces = [tickets[: (hit - start) * width]]
        while hit < end:
            upto = min(end, hit + length)
            piece = self._index.find(self._keys(request.block_hashes, hit, upto))
            piece = piece[: len(piece) // width * width]
            pieces.append(piece)
            hit += len(piece) // width
            if hit < upto:
                break
            length *= 2
        self._remember(request.request_id, np.concatenate(pieces))
        return hit

    def _remember(self, request_id: str, tickets: Tickets) -> None:
        self._tickets[request_id] = tickets
        if len(self._tickets) > MAX_REMEMBERED:
            self._tickets.popitem(last=False)

    def _keys(self, hashes: Sequence[bytes], first: int, last: int) -> list[Key]:
        """The keys of those blocks in all groups, those of one index beside each other."""
        some, width = hashes[first:last], len(self._suffixes)
        keys = [b""] * (len(some) * width)
        for number, suffix in enumerate(self._suffixes):
            keys[number::width] = [block_hash + suffix for block_hash in some]
        return keys

    def _windows(
        self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]], start: int, hit: int
    ) -> tuple[list[Key], BlockIds]:
        """The same where some groups' blocks are null (0), outside their windows."""
        keys, blocks = [], []
        for group in self._groups:
            for index in range(start, hit):
                block_id = block_ids[group.index][index]
                if block_id:
                    keys.append(block_key(hashes[index], group.index))
                    blocks.append(block_id)
        return keys, np.array(blocks, dtype=np.int32)
