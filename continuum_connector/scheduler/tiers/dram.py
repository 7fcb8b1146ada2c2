"""DramTier: keeps finished turns' blocks in host memory and gives them back (base.py, Tier).

It owns the host index; Traffic owns its copies. A copy that fails ends as a miss: its slots are
forgotten and its tokens are computed again (law 4).

Finder: how much of a waiting turn's prompt is in DRAM. vLLM asks in every step about each turn that
it cannot admit, while other turns' stores settle and blocks leave. So the Finder remembers what it
found. With one group of full attention, it looks for new blocks from where the last look ended. For
other models, vLLM's own lookup, which walks the whole prompt, is asked again only when a block of
that very prompt has come. A block that left matters only if it was among those found.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from continuum_connector.messages import BlockIds, StepPlan, WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import (
    FULL,
    ChainBlocks,
    Key,
    KvGroup,
    KvGroups,
    block_key,
    full_keys,
)
from continuum_connector.scheduler.tiers.base import Below, RankAt, TierEvents
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import NO_TICKETS, Chain, Tickets
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Traffic,
    Transfer,
    TransferState,
)

MOST_CHANGED = 8  # of a chain, an eighth may be other than the prompt that goes on from it
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class DramPlan:
    """Host memory as configured. `num_slots`: of each rank, 0 for no tier. `block_bytes`: of one
    block on all ranks. `is_default`: nobody asked for this size, so what is there is all that is
    wanted.
    """

    num_slots: int
    block_bytes: int
    is_default: bool = False


class DramTier:
    """The scheduler's view of host memory, and of what lies `below` it. With no slots it holds
    nothing and finds nothing.

    A slot can be used once every rank has reported it. `rank_at`: the worth of chains, also of the
    one being stored. Those worth least leave first; with None, the least recently used.
    """

    def __init__(
        self,
        plan: DramPlan,
        groups: KvGroups,
        traffic: Traffic,
        account: Account,
        events: TierEvents | None = None,
        rank_at: RankAt | None = None,
        below: Callable[[HostIndex], Below] | None = None,
    ) -> None:
        self.index = HostIndex(0, not groups.are_simple, below)
        self.below = self.index.below
        self.names: Sequence[str] = ("dram", *self.below.names)
        self.is_up = plan.num_slots > 0
        self._down_reason = ""
        self.rank_at = rank_at
        self.num_wanted_slots = plan.num_slots
        self._num_there = 0
        self._block_bytes = plan.block_bytes
        self._ready_slots: dict[int, int] = {}  # rank -> host slots it can use
        self.traffic = traffic
        self._owner = Owner(self._settled, self._hangs)
        self._account = account
        self.events = events
        self._groups = groups
        self._found = Finder(self.index, groups)
        # For each store under way, the end and the key of the block that comes first in its chain.
        self._firsts: dict[int, tuple[int, Key]] = {}
        self._brings: dict[int, bytes] = {}  # for each load, the hash of its first block
        self._is_default = plan.is_default
        account.gauge("tier_up", float(self.is_up))

    @property
    def num_blocks(self) -> int:
        return max(self.num_wanted_slots, self.below.num_blocks) if self.is_up else 0

    @property
    def down_reason(self) -> str:
        return self._down_reason or self.below.down_reason

    # --- stores -----------------------------------------------------------------------
    def store(
        self,
        program: str,
        blocks: ChainBlocks,
        now: float,
        request: Any = None,
        is_prompt_own: bool = True,
    ) -> bool:
        """HostIndex.reserve says which older chains this supersedes."""
        keys, is_up = blocks.keys, self.is_up
        if None in keys:  # vLLM forgot them while a pin held them (BlockPool.evict_blocks)
            is_up = is_up and self._groups.are_simple
            num_named = next(number for number, key in enumerate(keys) if key is None)
            blocks = blocks.only(range(num_named))
            keys = blocks.keys
        if not is_up:
            return False
        rank = None if self.rank_at is None else self.rank_at(now)
        evicted_before, refused_before = self.index.num_evicted, self.index.num_refused
        num_prompt = _num_prompt(blocks, request) if is_prompt_own else 0
        numbers = self.index.slots_of(keys, program)
        missing = (numbers < 0).nonzero()[0]
        slots = self.index.reserve(keys, program, now, rank, num_prompt, blocks.ends, numbers)
        self._account.count("dram_evicted_blocks", self.index.num_evicted - evicted_before)
        num_refused = self.index.num_refused - refused_before
        self._account.count("dram_refused_blocks", num_refused)
        has_most = 2 * num_refused <= len(blocks) if self._groups.are_simple else not num_refused
        if not len(slots):
            return has_most
        if len(slots) < len(blocks):
            blocks = blocks.only(missing[: len(slots)].tolist())
        transfer = self.traffic.store(self._owner, program, blocks, slots, now)
        self._firsts[transfer.id] = blocks.ends[0], blocks.keys[0]
        if self.events is not None and request is not None:
            self.events.describe(transfer.id, request, blocks.keys, blocks.ends)
        return has_most

    # --- loads ------------------------------------------------------------------------
    def find(self, request: Any, num_vram_tokens: int) -> int:
        if not self.is_up or not self.index.num_ready:
            return 0
        return self._found.find(request, num_vram_tokens)

    def is_coming(self, block_hash: bytes) -> bool:
        return self.is_up and block_hash in self._brings.values()

    def load(
        self,
        program: str,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        now: float,
    ) -> Mapping[str, int]:
        start = self._found.start_of(request.request_id)
        blocks, slots = self._found.take(request, block_ids, num_tokens)
        # vLLM waits for this load now. If a slot has gone since the promise, the load names no
        # slots, so that every rank refuses it and its tokens are computed again.
        slots = np.full(len(blocks), -1) if slots is None else self.index.acquire(slots)
        load = self.traffic.load(self._owner, program, request.request_id, blocks, slots, now)
        self._brings[load.id] = request.block_hashes[start // self._groups.hash_size]
        self.index.use(program, slots[-1:], now)
        came_up = self.below.came_up(request.request_id, start, num_tokens)
        return {"dram": num_tokens - sum(came_up.values()), **came_up}

    def forget_request(self, request_id: str) -> None:
        self.below.forget(request_id)
        self._found.forget(request_id)

    # --- what leaves ------------------------------------------------------------------
    def lend(self, program: str, request: Any, num_tokens: int) -> None:
        if not self._groups.are_simple:  # windows and states: VRAM has others than DRAM
            return
        for chain in reversed(self.index.chains_of(program)):
            if self._is_of(chain, request.block_hashes, num_tokens):
                self.index.order.lend(chain, request.request_id)
                return

    def _is_of(self, chain: Chain, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether the first `num_tokens` of that prompt are nearly all of the chain. Not to its
        end, because the prompt may repeat the answer without the thinking in it."""
        length = len(chain.tickets)
        num = max(1, length - max(1, length // MOST_CHANGED))
        has_it = num * self._groups.hash_size <= num_tokens and num <= len(hashes)
        if not has_it:
            return False
        return self.index.is_at(int(chain.tickets[num - 1]), block_key(hashes[num - 1], 0))

    def take_back(self, program: str) -> None:
        self.index.order.take_back(program)

    def end_loan(self, program: str, request_id: str) -> int:
        return self.index.order.end_loan(program, request_id)

    def demote(self, program: str, blocks: ChainBlocks, request: Any) -> None:
        keys = [key for key in blocks.keys if key is not None]
        self.index.demote(program, keys, _num_prompt(blocks, request))
        self.below.demote(program, blocks.keys)

    def demote_all(self, program: str) -> None:
        self.index.order.demote_all(program)
        self.below.demote_all(program)

    def residence_s(self, now: float) -> float:
        return self.index.residence.seconds(now)

    def reset(self) -> list[Transfer]:
        over = self.below.reset() + self.traffic.abandon(self._owner)
        self.index.clear()
        return over

    # --- every step -------------------------------------------------------------------
    @property
    def next_look(self) -> float:
        return self.traffic.next_look(self.below.look_every_s)

    def plan(self, now: float) -> StepPlan:
        self.traffic.look(now)
        self.index.past.tidy()
        self.below.step(now)
        return self.traffic.drain()

    def hear(self, report: WorkerReport) -> None:
        """Take in how many slots a rank has, or that it has none any more."""
        if report.tier_down and self.is_up:
            self._go_down(report.tier_down)
        if report.ready_slots:
            self._grow(report.ready_slots)
        self.below.hear(report)

    def take_events(self) -> list[Any]:
        self.below.announce()
        gone = self.index.take_gone()
        if self.events is None:
            return []
        self.events.removed(gone)
        return self.events.take()

    def update_gauges(self) -> None:
        account, index = self._account, self.index
        account.gauge("dram_capacity_blocks", self._num_there if self.is_up else 0)
        account.gauge("dram_blocks", index.num_ready, "ready")
        account.gauge("dram_blocks", index.num_writing, "writing")
        account.gauge("dram_used_bytes", (index.num_slots - index.num_free) * self._block_bytes)
        self.below.update_gauges()

    # --- parts ------------------------------------------------------------------------
    def _grow(self, ready_slots: dict[int, int]) -> None:
        """A block lies in the same slot on every rank, so the slowest rank sets the pace."""
        self._ready_slots |= ready_slots
        if len(self._ready_slots) == self.traffic.world_size:
            self._num_there = min(self.num_wanted_slots, *self._ready_slots.values())
            self.index.grow(self._num_there)
            if self._is_default:
                self._account.gauge("dram_wanted_blocks", self._num_there)

    def _settled(self, transfer: Transfer) -> None:
        if transfer.kind is Kind.STORE:
            first = self._firsts.pop(transfer.id)
            if transfer.state is TransferState.DONE:
                self._found.came(*first)
            self.index.settle(transfer.slots, stored=transfer.state is TransferState.DONE)
            if transfer.state is TransferState.DONE:
                self.below.stored(transfer.program)
            if self.events is not None:
                self.events.stored(transfer.id, set(self.index.keys_of(transfer.slots)))
            return
        del self._brings[transfer.id]
        if transfer.slots[0] >= 0:
            if transfer.outcome is not None and "corrupt" in transfer.outcome.reasons:
                self.below.doubted(transfer.slots)
            self.index.release(transfer.slots, corrupt=transfer.state is TransferState.FAILED)

    def _hangs(self, sentence: str) -> None:
        if self.is_up:
            self._go_down(sentence)
            logger.warning("No DRAM tier: %s; restart the server", sentence)

    def _go_down(self, reason: str) -> None:
        self.is_up = False
        self._down_reason = reason
        self.index.clear()
        if self.events is not None:
            self.events.lost()
        self._account.gauge("tier_up", 0.0)
        self.below.dram_down()


def _num_prompt(blocks: ChainBlocks, request: Any) -> int:
    """How many of a turn's blocks its prompt has, less the last, which may hold what its template
    puts before an answer alone; 0 where the turn is not known any more."""
    num = 0 if request is None else bisect_right(blocks.ends, request.num_prompt_tokens)
    return max(0, num - 1)


# Turns whose slots are remembered, 8 bytes per slot: vLLM asks about few turns in one step.
MAX_REMEMBERED = 64
MAX_ARRIVALS = 256  # settled stores; a turn not asked about during more of them looks anew
_FIRST_LOOK = 16  # blocks; then twice as many each time, so that a miss costs little
# If a load would get blocks that DRAM lacks, a shorter hit is looked up, at most so often.
_MAX_LOOKUPS = 4


@dataclass(eq=False, slots=True)
class _Promise:
    """Tokens [start, hit) are in DRAM, as of these counts of the index and of stores; when last
    looked, up to `full` if it were for full attention alone."""

    start: int
    hit: int
    full: int
    version: int
    num_lost: int
    num_arrivals: int = 0


class Finder:
    """What DRAM has of each turn that was asked about and has not been loaded since."""

    def __init__(self, index: HostIndex, groups: KvGroups) -> None:
        self._index, self._groups = index, groups
        self._promises: dict[str, _Promise] = {}
        self._tickets = Remembered()
        self._epoch = index.num_epochs  # in which the tickets were found
        self._arrivals = Arrivals(groups)
        # Requests whose promise was cut to where no hit ends: the same one would be made for ever.
        self._cut: set[str] = set()
        # Says where the hit that begins somewhere ends, where it would end if it were for full
        # attention alone, and which blocks of the request to load.
        self._look: EveryBlock | ByRule
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
            found = self._look.hit(request, start, known)
            known = _Promise(start, *found, index.version, index.num_lost, self._arrivals.num)
            self._promises[request.request_id] = known
        if known.full > known.hit:
            self._groups.lookup.keep_at(request, known.hit, known.full)
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

    def hit(self, request: Any, start: int, known: _Promise | None) -> tuple[int, int]:
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
            return hit * size, hit * size
        pieces = [tickets]
        while hit < end:
            upto = min(end, hit + length)
            piece = index.find(full_keys(hashes[hit:upto]))
            pieces.append(piece)
            hit += len(piece)
            if hit < upto:
                break
            length *= 2
        self._tickets.put(request.request_id, np.concatenate(pieces))
        return hit * size, hit * size

    def slots(
        self, request: Any, block_ids: Sequence[Sequence[int]], start: int, hit: int
    ) -> tuple[BlockIds, Tickets]:
        size = self._groups.hash_size
        first, last = start // size, hit // size
        blocks = np.array(block_ids[0][first:last], dtype=np.int32)
        tickets = self._tickets.pop(request.request_id, None)
        if tickets is None:  # too many other requests were asked about since
            tickets = self._index.find(full_keys(request.block_hashes[first:last]))
        return blocks, tickets[: len(blocks)]


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

    def hit(self, request: Any, start: int, known: _Promise | None) -> tuple[int, int]:
        if known is not None and known.start == start and self._stands(request, known):
            return known.hit, known.full
        hit, hashes, index, full = request.num_tokens, request.block_hashes, self._index, 0
        for _ in range(_MAX_LOOKUPS):
            hit, longest = self._lookup.longest_hit(hashes, start, hit - 1, index.is_ready)
            full = max(full, longest)
            if hit == start:
                break
            keys = self._needed(hashes, start, hit)
            tickets = index.find(keys)
            if len(tickets) == len(keys):
                self._tickets.put(request.request_id, tickets)
                return hit, full
        self._tickets.put(request.request_id, NO_TICKETS)
        return start, full

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
