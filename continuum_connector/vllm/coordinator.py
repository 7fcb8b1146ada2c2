"""Coordinator: vLLM's own rule for prefix hits, asked at the end of a turn and of what a load can
bring, and the block tables of its turns.

Only this file touches these names of v1/core/kv_cache_coordinator.py and
v1/core/single_type_kv_cache_manager.py, which vLLM does not promise. Like compat.py, it goes by
feature.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from continuum_connector.scheduler.kv_groups import Key, KvGroups, block_key
from continuum_connector.scheduler.stock import StockCache, UnknownStock
from continuum_connector.vllm import compat


def find(pool: Any) -> Any:
    """Return the KVCacheCoordinator of `pool`, or None.

    For vLLM <= 0.29; later ones bind the manager, which has it (bind_kv_cache_manager). Call it
    while vLLM binds the pool to the connector. Only the scheduler has the coordinator, and
    it binds the pool in its constructor (v1/core/sched/scheduler.py, __init__). We find it on the
    call stack, because we do not have the scheduler yet.
    """
    managers = (getattr(each, "kv_cache_manager", None) for each in compat.callers())
    found = (each for each in managers if getattr(each, "block_pool", None) is pool)
    return getattr(next(found, None), "coordinator", None)


def hit_in_all_groups(coordinator: Any) -> None:
    """Mend the lookup of vLLM 0.26 for models with states, for as long as a connector is there.

    With a connector, its scheduler takes the longest hit of any group as the hit, as if every
    connector brought the rest unasked (schedule(), find_longest_cache_hit_per_group), so turns
    would read KV that was never computed. From now on every group hits only what all groups hit.
    """
    if not hasattr(coordinator, "find_longest_cache_hit_per_group"):
        return

    def per_group(block_hashes: Any, max_cache_hit_length: int) -> Any:
        blocks, hit, *_ = coordinator.find_longest_cache_hit(block_hashes, max_cache_hit_length)
        return blocks, (hit,) * len(blocks)

    coordinator.find_longest_cache_hit_per_group = per_group


class HitRule:
    """Asks vLLM which blocks the next turn will hit, and makes the running turn keep what that hit
    needs.

    Blocks of windows, chunks and states leave a running turn. With
    `prefix_cache_retention_interval` 0, vLLM's default, they keep a hash only where the prompt ends
    (reachable_block_mask). A turn that goes on from the answer would then compute the answer again,
    and a block that has left may belong to another turn before this one ends. So the running turn
    keeps what a hit at its last block boundary needs (`spare` blocks), and vLLM hashes these when
    the turn ends. There is one such set per turn: to hash everything that decoding passes would
    cost other turns their cached blocks.

    With drafts, a state that decoding left is right only if every count of accepted drafts before
    it was right, and several releases of vLLM counted wrong (docs/models.md). So it is not hashed;
    vLLM does not hash it by default, either. What a hit at the prompt's end needs is kept instead.

    `is_on`: do so. `gives_way`: an allocation that fails calls `give_up_spare` and tries again, so
    that none fails because of a spare block.
    """

    def __init__(self, coordinator: Any, pool: Any) -> None:
        self._coordinator = coordinator
        self._pool = pool
        self.is_on = True
        self.gives_way = False
        managers = coordinator.single_type_managers
        self._states = [each for each in managers if hasattr(each, "mamba_cache_mode")]
        self._windows = [each for each in managers if hasattr(each, "sliding_window")]
        chunked = [each for each in managers if hasattr(each, "attention_chunk_size")]
        self._keeps_answers = not any(each.num_speculative_blocks for each in self._states)
        self._are_aligned = all(each.mamba_cache_mode == "align" for each in self._states)
        flagged = (each for each in managers if getattr(each, "use_eagle", False))
        self._flagged = [each for each in flagged if each not in self._states]
        # Tokens that a lookup drops for drafts (v1/core/kv_cache_utils.py, eagle_proof_margin).
        self.num_proof_tokens = max(map(self._margin, self._flagged), default=0)
        # For windows alone, vLLM allows for one more block (max_admission_blocks_per_request).
        self._is_reckoned = not (self._states or chunked or self.num_proof_tokens) and all(
            each.sliding_window % each.block_size == 0 for each in self._windows
        )
        self._sparse = [*self._states, *self._windows, *chunked]
        self._at: dict[str, int] = {}  # running turn -> boundary for whose hit it keeps blocks
        self._spare: dict[str, None] = {}  # those that still keep these blocks
        self._remove = coordinator.remove_skipped_blocks
        if self._sparse:
            spare = self._spare_answers if self._keeps_answers else self._spare_prompts
            coordinator.remove_skipped_blocks = spare

    def switch(self, is_on: bool) -> None:
        self.is_on = is_on

    def give_way(self) -> None:
        """From now on an allocation that fails asks for the spare blocks."""
        self.gives_way = True

    # --- at the end of a turn ---------------------------------------------------------
    def take_kept(self, request: Any, also: Iterable[int]) -> list[tuple[list[int], list[Any]]]:
        """The turn is over: let vLLM hash what it kept for the next one, and forget it. Return, for
        each KV group, where the blocks that the next turn will hit end (in tokens, ascending), and
        the blocks. They may have left the request already and lie in the free queue with their
        hash. The cost grows with the hit.

        `also`: in tokens; what hits that end there need is returned, too, as far as it exists.
        """
        self._forget(request.request_id)
        hashes, limit = request.block_hashes, request.num_tokens
        if not self._keeps_answers:
            limit = request.num_prompt_tokens
        elif getattr(self._coordinator, "retention_interval", None) is not None:
            self._hash_last(request)
        found, hit = self._found(request, limit)
        kept = []
        for manager, blocks in zip(self._coordinator.single_type_managers, found, strict=True):
            places = [(i, block) for i, block in enumerate(blocks) if not block.is_null]
            ends = [min((i + 1) * manager.block_size, hit) for i, _ in places]
            kept.append((ends, [block for _, block in places]))
        for manager in self._flagged if hit else ():
            end = hit + self._margin(manager)
            proof = self._cached(manager, hashes, (hit // manager.block_size + 1), end)
            ends, blocks = kept[manager.kv_cache_group_id]
            if proof is not None and proof not in blocks[-1:]:
                ends.append(end)
                blocks.append(proof)
        for end in also:
            if 0 < end < hit:
                self._add_hit(kept, hashes, end)
        return kept

    def _add_hit(self, kept: list[Any], hashes: Sequence[Any], hit: int) -> None:
        """Add what a shorter hit needs; of full attention it needs no more than the longest."""
        fine = getattr(self._coordinator, "enable_partial_hash_hits", False)
        wanted = {}
        for manager in self._sparse if not fine else ():
            size, group = manager.block_size, manager.kv_cache_group_id
            last = hit + (self._margin(manager) if manager in self._flagged else 0)
            ends = range((manager.get_num_skipped_tokens(hit) // size + 1) * size, last + 1, size)
            wanted[group] = {end: self._cached(manager, hashes, end // size, end) for end in ends}
        if any(None in blocks.values() for blocks in wanted.values()):
            return  # other turns took some of it, and the rest alone is of no use
        for group, blocks in wanted.items():
            merged = blocks | dict(zip(*kept[group], strict=True))
            kept[group] = sorted(merged), [merged[end] for end in sorted(merged)]

    def _found(self, request: Any, limit: int) -> tuple[Sequence[Any], int]:
        """Do vLLM's lookup up to `limit` tokens, but skip states that other turns compute on.

        With a match unit finer than blocks, a state in the middle of a turn's prompt can be found
        for one step. The next step moves its hash to a copy and goes on in the block itself
        (MambaManager, _cache_partial_tail_block), and a store copies only after that step.
        """
        hashes, size = request.block_hashes, self._pool.hash_block_size
        passing = {
            block.block_id
            for each in self._states
            for request_id, (_, block) in each._partial_hit_reqs.items()
            if request_id != request.request_id
        }
        limit = min(limit, len(hashes) * size)
        while True:
            found, hit, *_ = self._coordinator.find_longest_cache_hit(hashes, limit)
            states = [b for each in self._states for b in found[each.kv_cache_group_id][-1:]]
            if passing.isdisjoint(each.block_id for each in states):
                return found, hit
            limit = hit - 1

    def _cached(self, manager: Any, hashes: Sequence[Any], number: int, end: int) -> Any:
        """The block after the hit, found by the hash of its own end or by that of `end` inside it.
        Without it, the next lookup would drop another block and find no state or window there."""
        size = self._pool.hash_block_size
        for tokens in (number * manager.block_size, end):
            if tokens // size <= len(hashes):
                block_hash = hashes[tokens // size - 1]
                found = self._pool.get_cached_block(block_hash, [manager.kv_cache_group_id])
                if found:
                    return found[0]
        return None

    def _margin(self, manager: Any) -> int:
        fine = getattr(self._coordinator, "enable_partial_hash_hits", False)
        if fine and manager.supports_fine_grained_hash_lookup:
            return int(min(self._pool.hash_block_size, manager.block_size))
        return int(manager.block_size)

    def _hash_last(self, request: Any) -> None:
        """Let vLLM hash what a hit at the turn's last boundary reads, as far as it exists."""
        size, ends = self._coordinator.scheduler_block_size, []
        for manager in self._coordinator.single_type_managers:
            # How far vLLM itself has gone, hashing blocks or skipping them: these are computed.
            end = manager.num_cached_block.get(request.request_id, 0) * manager.block_size
            ends.append(end - (self._margin(manager) if manager in self._flagged else 0))
        hit = min(ends) // size * size
        if hit <= 0:
            return  # the turn is shorter than a block, so no hit reads it
        for manager in self._windows:
            last = hit // manager.block_size
            first = max(0, last - -(-(manager.sliding_window - 1) // manager.block_size))
            self._hash(request, manager, first, last + (manager in self._flagged))
        # Before the prompt's end, vLLM may put another state into a block than that of its end
        # (_cache_partial_tail_block), and after a preemption it computes an answer as a prompt.
        if hit >= max(request.num_prompt_tokens, 1) and not request.num_preemptions:
            for manager in self._states:
                last = hit // manager.block_size
                self._hash(request, manager, last - 1, last)

    def _hash(self, request: Any, manager: Any, first: int, last: int) -> None:
        blocks = manager.req_to_blocks.get(request.request_id, ())
        wanted = blocks[first:last]
        mask = [block.block_hash is None for block in wanted]
        if len(wanted) == last - first and any(mask) and not any(b.is_null for b in wanted):
            group, size = manager.kv_cache_group_id, manager.block_size
            self._pool.cache_full_blocks(request, blocks, first, last, size, group, mask)

    # --- while a turn runs ------------------------------------------------------------
    # Each stands in for KVCacheCoordinator.remove_skipped_blocks.
    def _spare_answers(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Of an answer, count only the tokens up to the last block boundary, less those that a
        lookup drops for drafts.

        What stays belongs to the request and is freed with it, however the request ends.
        """
        processed = processed_computed_tokens
        spares = self.is_on and (self.gives_way or self._is_reckoned)
        if spares and num_prompt_tokens is not None and processed >= num_prompt_tokens:
            size = self._coordinator.scheduler_block_size
            first = self._coordinator.single_type_managers[0]
            # At the end of a turn, drafts may be computed that no step has cached.
            cached = first.num_cached_block.get(request_id, 0) * first.block_size
            boundary = max(0, min(processed, cached) - self.num_proof_tokens) // size * size
            if self._at.get(request_id) != boundary:
                self._note(request_id, boundary)
            processed = boundary if request_id in self._spare else processed
        self._remove(request_id, processed, num_prompt_tokens)

    def _spare_prompts(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Where answers are not kept, the states at the prompt's end stay.

        They stay in the request's table, and so are freed with the request. Only `_remove` does not
        see them, and goes on past them.
        """
        spared: list[tuple[Any, Any, int, Any]] = []
        if self.is_on and self.gives_way and num_prompt_tokens is not None:
            size = self._coordinator.scheduler_block_size
            end = max(0, num_prompt_tokens - self.num_proof_tokens) // size * size
            if 0 < end < processed_computed_tokens + size:
                if self._at.get(request_id) != end:
                    self._note(request_id, end)
                if request_id in self._spare:
                    spared = self._prompts_states(request_id)
        for _, table, column, _ in spared:
            table[column] = self._pool.null_block
        self._remove(request_id, processed_computed_tokens, num_prompt_tokens)
        for _, table, column, state in spared:
            table[column] = state

    def _prompts_states(self, request_id: str) -> list[tuple[Any, Any, int, Any]]:
        """(manager, table, column, block) of each state with which the turn's prompt can be hit: at
        its last boundary or, if it fills its blocks, at the one before (replay_boundaries)."""
        spared = []
        for manager in self._states if self._are_aligned else ():
            table = manager.req_to_blocks.get(request_id, ())
            column = self._at[request_id] // manager.block_size - 1
            near = range(max(0, column - 1), min(column + 1, len(table)))
            spared += [
                (manager, table, i, table[i]) for i in near if table[i].block_hash is not None
            ]
        return spared

    def _note(self, request_id: str, boundary: int) -> None:
        """The turn has passed a block boundary: from now on it keeps what a hit there needs."""
        self._at[request_id] = boundary
        self._spare[request_id] = None
        tables = self._coordinator.single_type_managers[0].req_to_blocks
        if len(self._at) > 2 * len(tables) + 64:  # preempted turns are among them
            for each in [each for each in self._at if each not in tables]:
                self._forget(each)

    def _forget(self, request_id: str) -> None:
        self._at.pop(request_id, None)
        self._spare.pop(request_id, None)

    def count_spare(self) -> int:
        """Count the blocks, at most, that running turns keep and vLLM would not; turns that no
        longer run are forgotten first. O(those turns)."""
        tables = self._coordinator.single_type_managers[0].req_to_blocks
        for each in [each for each in self._spare if each not in tables]:
            self._forget(each)  # it was preempted, or ended while we were off
        if not self._keeps_answers:
            return sum(len(self._prompts_states(each)) for each in self._spare)
        per_boundary = 1 + -(-self.num_proof_tokens // self._coordinator.scheduler_block_size)
        return len(self._spare) * len(self._sparse) * int(per_boundary)

    def give_up_spare(self, requests: Mapping[str, Any]) -> bool:
        """Free the spare blocks of one running turn, found by its id in `requests`; False if no
        turn keeps any. The turn keeps none again until its next block boundary."""
        tables = self._coordinator.single_type_managers[0].req_to_blocks
        while self._spare:
            request_id, _ = self._spare.popitem()
            request = requests.get(request_id)
            if request is not None and request_id in tables and self._free_spare(request):
                return True
        return False

    def _free_spare(self, request: Any) -> bool:
        """Free what the turn keeps only for its next turn; False if that frees nothing."""
        processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        if self._keeps_answers:
            self._remove(request.request_id, processed, request.num_prompt_tokens)
            return True
        states = self._prompts_states(request.request_id)
        # vLLM frees a state that the turn is past, as the block that it computed on before.
        for manager, _, column, _ in states:
            before = manager.last_state_block_idx.get(request.request_id)
            manager.last_state_block_idx[request.request_id] = column
            manager.remove_skipped_blocks(request.request_id, processed)
            if before is not None:
                manager.last_state_block_idx[request.request_id] = before
        return any(table[column].is_null for _, table, column, _ in states)

    def waits_for_step(self, found: Any) -> bool:
        """Whether an allocation fails because its hit, `found`, is a state of this very step. More
        room would not help; the next step can allocate it
        (MambaManager.get_num_blocks_to_allocate)."""
        blocks = () if found is None else found.blocks
        return bool(blocks) and any(
            blocks[each.kv_cache_group_id][-1].block_hash in each.cached_blocks_this_step
            for each in self._states
            if blocks[each.kv_cache_group_id]
        )


class Shadow:
    """The same rule, asked of blocks that lie elsewhere than in VRAM (kv_groups.py, `lookup`).

    It is a copy of the coordinator whose pool answers for these blocks. So a load can bring what
    vLLM would hit if all of it were in VRAM, with full attention, windows, chunks, states, and
    drafts that drop a block.
    """

    def __init__(self, coordinator: Any, pool: Any) -> None:
        self._pool = _Elsewhere(pool, len(coordinator.single_type_managers))
        self._coordinator = copy.copy(coordinator)
        self._managers = tuple(map(copy.copy, coordinator.single_type_managers))
        self._coordinator.single_type_managers = self._managers
        for each in (self._coordinator, *self._managers):  # vLLM >= 0.32 asks the managers' pool
            each.block_pool = self._pool

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, limit: int, has: Callable[[Key], bool]
    ) -> tuple[int, int]:
        """Return the end of the longest hit up to `limit` tokens, of which the first `start` are
        hit in VRAM and the load `has` the rest; `start` if there is none. And where it would end if
        windows and states were there, too. O(blocks of the hit).

        What a longer hit needs before `start`, the hit that ends there needs, too, so vLLM has it.
        """
        pool = self._pool
        pool.in_vram, pool.has = frozenset(hashes[: start // pool.hash_block_size]), has
        _, hit, *lacks = self._coordinator.find_longest_cache_hit(hashes, limit)
        pool.in_vram, pool.has = frozenset(), _has_nothing
        return max(start, int(hit)), int(hit + sum(lacks[:1]))

    def keep_at(self, request: Any, hit: int, end: int) -> None:
        """A load can bring what is hit up to `hit`, and full attention up to `end`: let vLLM keep
        windows and states there, as where a prompt departs from what is in VRAM, the only place
        where it looks (get_computed_blocks). It keeps one such end, so what it found beyond `hit`
        stays: others that run now begin so."""
        if request.skip_reading_prefix_cache:
            return  # it looks for none, either
        if getattr(request, "shared_prefix_boundary", 0) <= hit:
            request.shared_prefix_boundary = end

    def first_read(self, group: int, hit: int) -> int:
        """The first token before `hit` for which vLLM gives a load blocks of the group
        (allocate_external_computed_blocks). From there on, all blocks must be loaded."""
        return max(0, int(self._managers[group].get_num_skipped_tokens(hit)))


class _Elsewhere:
    """The part of a BlockPool that the lookup reads. It returns null blocks, because all that
    matters is whether a block is there."""

    def __init__(self, pool: Any, num_groups: int) -> None:
        self.null_block, self.hash_block_size = pool.null_block, pool.hash_block_size
        self.in_vram: frozenset[bytes] = frozenset()
        self.has: Callable[[Key], bool] = _has_nothing
        self._suffixes = [block_key(b"", group) for group in range(num_groups)]

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Any:
        if block_hash not in self.in_vram:
            for group in kv_cache_group_ids:
                if not self.has(block_hash + self._suffixes[group]):
                    return None
        return [self.null_block] * len(kv_cache_group_ids)


def _has_nothing(_: Key) -> bool:
    return False


def popper(found: Any, groups: KvGroups) -> Callable[[str], list[Any]] | None:
    """What takes a turn's blocks from vLLM, in order, for the caller to free; None where this vLLM
    must free them itself: a hit needs more than blocks of one kind."""
    pop: Callable[[str], list[Any]] | None = getattr(found, "pop_blocks_for_free", None)
    return pop if groups.are_simple else None


def stock_beside(pool: Any, found: Any, groups: KvGroups) -> UnknownStock:
    """What stock vLLM would have kept in a pool like this one, of the coordinator `found`; unknown
    where a hit needs more than blocks of one kind, or where this vLLM has no such tables."""
    size = next(iter(groups)).block_size
    manager = next(iter(getattr(found, "single_type_managers", ())), None)
    tables = getattr(manager, "req_to_blocks", None)
    num_cached = getattr(manager, "num_cached_block", None)
    if not groups.are_simple or size != groups.hash_size or tables is None or num_cached is None:
        return UnknownStock()
    num_dropped = groups.num_proof_tokens // size
    return StockCache(pool.num_gpu_blocks - 1, size, tables, num_cached, num_dropped)
