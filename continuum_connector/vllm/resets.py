"""Resets: what a new epoch needs of vLLM's scheduler, which knows no epochs.

Waiting turns may own KV already, which only a connector gives them. vLLM neither takes it back nor
resets its prefix cache while they have it. So they lose it, and are computed like any other turn.

vLLM does not reset its prefix cache while turns run, either. What was cached is then forgotten all
the same; otherwise no turn that finds an older system prompt could be kept until somebody asks for
a reset again. Running turns end with the KV that they have, and what they have cached is forgotten
with them (OlderTurns).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.request import RequestStatus

from continuum_connector.vllm import compat, touched
from continuum_connector.vllm.touched import Part

_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _take_kv(scheduler: Any, request: Any) -> None:
    """As a preemption does, without one: vLLM preempts running turns only."""
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0


class Resets:
    """Carries out the resets of one scheduler: vLLM's own, without what hinders them."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        side = ours.side
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._ours = ours
        self._queues = side.queues
        traffic, steps = side.traffic, side.steps
        self._ledger, self._holds, self._epochs = traffic.ledger, traffic.holds, steps.epochs
        self._epochs.call_once_begun(self._on_begin)
        # Whether every block of a turn is in a table. Blocks that left a running turn's window or
        # chunk are in none and may be cached; so are blocks of a turn that ended, if another
        # connector beside ours needs vLLM's fence around them.
        self._tells_blocks = side.groups.are_simple and scheduler.connector is ours
        self._is_refused = False  # the last reset
        self._older_turns: OlderTurns | None = None
        self._version: str | None = None
        self._version_now = _weight_version()

    def before_step(self) -> None:
        """Begin an epoch if vLLM was told another weight version since the last step; after a reset
        that was refused, forget what is cached as soon as we are on."""
        if self._is_refused:
            self._forget_cached()
        version = self._version_now()
        if version != self._version:
            if self._version is not None:  # or it is the first step
                self._ours.begin_epoch(version, is_version=True)
            self._version = version

    def reset(self, own: Callable[..., bool], name: Any) -> bool:
        """Begin an epoch, then reset. `own`: vLLM's reset, which may or may not ask our connector,
        too. `name`: `reset_connector` as vLLM got it; a client may have put the name of its weights
        there."""
        self._ours.begin_epoch(name if isinstance(name, str) else "")
        done = False
        try:
            with self._epochs.resetting(), as_if_free(self._pool, self._holds.num_blocks):
                done = bool(own())
        finally:  # it raises if running turns were to go and a session keeps its blocks
            if done:
                self._epochs.vram_emptied()
            else:
                self._is_refused = self._tells_blocks
                self._forget_cached()
        return done

    def _on_begin(self) -> None:
        self._is_refused = False
        self._end_older_turns()
        self._forget_loaded()

    def _end_older_turns(self) -> None:
        if self._older_turns is not None:
            self._older_turns.end()
            self._older_turns = None

    def _forget_cached(self) -> None:
        """Forget what vLLM refused to forget, while we are on; again, if we were off meanwhile."""
        epochs = self._epochs
        if self._is_refused and self._ours.is_on and epochs.found_older is None:
            self._end_older_turns()
            self._is_refused = not epochs.is_vram_of_now
            if self._is_refused:
                self._older_turns = OlderTurns(self._scheduler, epochs)

    def _forget_loaded(self) -> None:
        """Take from every waiting turn what was loaded for it."""
        if touched.is_off(Part.TIER):
            return  # nothing of ours was loaded
        loads: defaultdict[str, list[Any]] = defaultdict(list)
        for each in self._ledger:
            loads[each.request_id].append(each)
        for request in list(self._scheduler.requests.values()):
            if self._take_loaded(request, loads[request.request_id]):
                self._queues.rerank(request.request_id)  # turns with KV stand before those without

    def _take_loaded(self, request: Any, loads: list[Any]) -> bool:
        """Take from the turn what was loaded; return whether it waits and had any. `loads`: those
        under way, which keep the blocks that they write to until they have settled.

        A turn that is over, and waits only for the end of its load, loses its blocks, too. A turn
        whose load is not ours keeps them, because we cannot say when they are free.
        """
        scheduler, request_id = self._scheduler, request.request_id
        for load in loads:
            if load.hold is None:  # released when it settles
                load.keep(
                    self._holds.take([self._pool.blocks[n] for n in load.blocks], load.blocks)
                )
        if request.is_finished():
            if loads:
                scheduler.kv_cache_manager.free(request)
        elif compat.is_loading(request):
            if loads or request_id in scheduler.finished_recving_kv_req_ids:
                # Treated as a failed load: once it has ended, vLLM asks for all of it anew
                # (_update_waiting_for_remote_kv), and freeing nothing then does no harm.
                _take_kv(scheduler, request)
                compat.reserve_nothing(scheduler, request)
                scheduler.failed_recving_kv_req_ids.add(request_id)
                return True
        elif request.status in _WAITING and request.num_computed_tokens:
            _take_kv(scheduler, request)
            compat.wait_without_kv(scheduler, request)
            return True
        return False


class OlderTurns:
    """The turns that run on with KV of an older epoch, when all else that was cached is forgotten.

    It lasts until these turns, and those that found what they cached meanwhile, have given their
    blocks back. Exact for one group of full attention, because what such a turn caches is in its
    table while it runs.
    """

    def __init__(self, scheduler: Any, epochs: Any) -> None:
        self._manager, self._epochs = scheduler.kv_cache_manager, epochs
        self._pool = self._manager.block_pool
        cached = (block.block_id for block in self._pool.blocks if block.block_hash is not None)
        self._pool.evict_blocks(set(cached))
        self._num_seen = {each: 0 for each in scheduler.requests if self._blocks_of(each)}
        self._theirs: set[int] = set()  # of these turns' blocks, those seen so far
        self._free = self._manager.free
        self._manager.free = self._take_along
        epochs.follow_older(self._found_theirs)
        self._end_if_over()

    def end(self) -> None:
        """Stop following these turns, and restore vLLM's `free`."""
        if self._manager.__dict__.get("free") == self._take_along:
            del self._manager.free  # the method of its class again

    def _found_theirs(self, request_id: str) -> bool:
        """Whether that turn has blocks of one of these turns; if so, it becomes one of them."""
        self._see()
        if request_id not in self._num_seen:
            blocks = enumerate(self._blocks_of(request_id))
            first = next((n for n, block in blocks if block.block_id in self._theirs), None)
            if first is not None:  # the blocks before it are of this epoch
                self._num_seen[request_id] = first
        return request_id in self._num_seen

    def _see(self) -> None:
        """Note the blocks that they got since; a table of full attention only grows."""
        for turn, num_seen in self._num_seen.items():
            blocks = self._blocks_of(turn)
            if len(blocks) > num_seen:
                self._theirs.update(block.block_id for block in blocks[num_seen:])
                self._num_seen[turn] = len(blocks)

    def _take_along(self, request: Any) -> None:
        """KVCacheManager.free: the turn ends, is preempted, or loses what was loaded."""
        if request.request_id in self._num_seen:
            self._see()
            del self._num_seen[request.request_id]
            blocks = self._blocks_of(request.request_id)
            # A shared block is not its own: it found the block, or another of these turns takes
            # it along.
            alone = {block.block_id for block in blocks if block.ref_cnt == 1} & self._theirs
            self._pool.evict_blocks(alone)
            self._theirs -= alone
        self._free(request)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._num_seen:
            return
        self.end()
        if self._epochs.found_older == self._found_theirs:  # or we were switched off meanwhile
            self._epochs.vram_emptied()

    def _blocks_of(self, request_id: str) -> Sequence[Any]:
        blocks: Sequence[Any] = self._manager.get_blocks(request_id).blocks[0]
        return blocks


def _weight_version() -> Callable[[], str]:
    """Return the function that says which weights vLLM was told to serve (>= 0.29;
    v1/engine/core.py). Only the engine core knows, and only its constructor leads to it, which is
    on the call stack while the scheduler is built."""
    from vllm.v1.engine.core import EngineCore

    core = next((each for each in compat.callers() if isinstance(each, EngineCore)), None)
    return getattr(core, "get_weight_version", lambda: "")


@contextmanager
def as_if_free(pool: Any, num_blocks: int) -> Iterator[None]:
    """Do not count as used the `num_blocks` that only our loads under way hold: vLLM refuses to
    reset its prefix cache while any block is used (BlockPool.reset_prefix_cache). The reset hands
    out no block, and these have no hash by which a turn could find them."""
    if not num_blocks:
        yield
        return
    own = pool.get_num_free_blocks
    pool.get_num_free_blocks = lambda: own() + num_blocks
    try:
        yield
    finally:
        del pool.get_num_free_blocks  # the method of its class again


def is_empty(pool: Any) -> bool:
    """Whether VRAM's prefix cache is empty, and no turn has blocks that might get into it."""
    num_used = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # the null block
    return not num_used and not len(pool.cached_block_hash_to_block)
