"""Soft pins, a prototype: pins count as free, and only their place in vLLM's free queue keeps them.

No reference is held, and `allocate_slots` stays vLLM's own (vLLM 0.32: BlockPool.unpin_blocks). So
no allocation fails for a pin. Before a step the free blocks of live pins go to the queue's tail,
those of the pin that is worth least first, and what a program left that has ended to its head.

`soft-line`: a turn for which pins would go that are worth more than its wait is asked again later,
and so are all behind it: what Room does inside the allocation, by get_num_new_matched_tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.common.arms import Role
from bench.sim.arms.arm import Away
from bench.sim.arms.ours import ours, set_up
from continuum_connector.scheduler.holds import Hold
from continuum_connector.scheduler.pins import LivePin, PinEnd
from continuum_connector.scheduler.room import MAX_WAIT_S, PinClaim

if TYPE_CHECKING:
    from bench.sim.engine import Engine

REORDER_STEPS = 16  # at least so often, because worth ages


class SoftHolds:
    """Stands where the table of the pins' holds is, and holds nothing."""

    num_holds = num_blocks = 0

    def take(self, blocks: Any, ids: Any = None) -> Hold:
        return Hold(blocks, ids)

    def release(self, hold: Hold) -> None:
        hold.released = True


class SoftPins:
    """Orders the free queue of one engine. `in_line`: see above."""

    def __init__(self, engine: Engine, in_line: bool) -> None:
        scheduler, side = engine.scheduler, engine.connector.side
        self.clock, self.scheduler, self.side = engine.clock, scheduler, side
        self.pool = scheduler.kv_cache_manager.block_pool
        self.queue = self.pool.free_block_queue
        self.pins, self.retention = side.pins, side.retention
        self.tail: Any = None  # the block at the queue's tail, once we have ordered it
        self.num_pins = self.num_steps = self.num_free = 0  # of pins: blocks in the queue
        self.ended: dict[int, tuple[Any, Any]] = {}  # blocks that programs left which have ended
        self.has_refused = False  # in this step
        self._take_over(scheduler._continuum.allocation)
        self._schedule, self._expire = scheduler.schedule, self.retention.expire
        self._keep, self._match = side._decisions.keep, side.match
        scheduler.schedule, self.retention.expire = self.schedule, self.expire
        side._decisions.keep = self.keep
        if in_line:
            side.match = self.match

    def _take_over(self, allocation: Any) -> None:
        allocation._put_in_place(False)
        allocation._put_in_place = lambda is_ours: None
        self.retention.holds = self.side.room._holds = allocation._pins = SoftHolds()
        if self.side.groups.rule is not None:
            self.side.groups.rule.gives_way = False  # nobody asks it to any more

    # --- around ours and vLLM's --------------------------------------------------------
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.has_refused = False
        self.num_steps += 1
        last = self.queue.fake_free_list_tail.prev_free_block
        is_same = last is self.tail and len(self.pins) == self.num_pins and not self.ended
        if not is_same or self.num_steps >= REORDER_STEPS:
            self.order()
        return self._schedule(*args, **kwargs)

    def expire(self, now: float, before: Callable[[LivePin], None]) -> None:
        if self.pins.next_deadline() <= now:
            self.lose(now)
        self._expire(now, before)

    def keep(self, turn: Any, request: Any, blocks: Any, end: Any, now: float) -> Any:
        choice = self._keep(turn, request, blocks, end, now)
        if turn.identity.hints.final and not turn.is_stray:
            pairs = zip(blocks.blocks, blocks.keys, strict=True)
            self.ended.update((pair[0].block_id, pair) for pair in pairs)
        return choice

    def match(self, request: Any, num_vram_tokens: int, now: float) -> Any:
        turn = self.side.begin_turn(request, now)
        is_early = now - turn.arrival < MAX_WAIT_S
        is_patient = is_early and not turn.is_admitted and not turn.is_preempted
        if self.scheduler.running and is_patient and not self._fits(request, num_vram_tokens, now):
            self.has_refused = True
            return None, False
        return self._match(request, num_vram_tokens, now)

    # --- parts ---------------------------------------------------------------------------
    def order(self) -> None:
        now, self.num_steps = self.clock(), 0
        self.lose(now)
        for pin in self.pins:
            if not pin.is_wish:
                pin.rank = (self.side.decider.worth_now(pin, now), pin.rank[1])
        key = lambda pin: (pin.is_returning and not pin.is_wish, pin.rank)  # noqa: E731
        ordered = sorted(self.pins, key=key, reverse=True)
        pinned = {b.block_id: b for pin in ordered for b in pin.blocks.blocks}
        kept = [block for block in pinned.values() if not block.ref_cnt]
        ended = [
            block
            for block, key in self.ended.values()
            if block.block_hash == key and not block.ref_cnt and block.block_id not in pinned
        ]
        for block in (*kept, *ended):
            self.queue.remove(block)
        self.queue.append_n(kept[::-1])
        self.queue.prepend_n(ended[::-1])
        self.ended, self.num_free, self.num_pins = {}, len(kept), len(self.pins)
        self.tail = self.queue.fake_free_list_tail.prev_free_block

    def lose(self, now: float) -> None:
        """Cut off pins what was handed out to others (vLLM 0.32: `on_reuse`)."""
        for pin in self.pins:
            pairs = enumerate(zip(pin.blocks.blocks, pin.blocks.keys, strict=True))
            left = next((n for n, (block, key) in pairs if block.block_hash != key), None)
            if left and self.side.groups.are_simple:
                pin.blocks = pin.blocks.only(range(left))
            elif left is not None:
                self.retention._end(pin, PinEnd.PRESSURE, now)

    def _fits(self, request: Any, num_vram_tokens: int, now: float) -> bool:
        """Whether a turn that waits finds room without the pins that it must spare (Room)."""
        decider, groups = self.side.decider, self.side.groups
        need = groups.num_full_blocks(request.num_tokens) - groups.num_full_blocks(num_vram_tokens)
        free = self.pool.get_num_free_blocks()
        if self.has_refused or need <= free - self.num_free:
            return not self.has_refused
        decider.blocked(now)
        if need > free:
            return True  # vLLM says no
        program = self.side.turns.get(request.request_id).program
        price = 1.0 / decider.costs.mean_blocks
        worth_now = lambda pin: decider.worth_now(pin, now)  # noqa: E731
        claim = PinClaim(program.key, program.arrival, True, price, worth_now)
        own = self.retention.awaited(program.key, request.request_id)
        spared = [pin for pin in self.pins if pin is own or not claim.may_take(pin)]
        return need <= free - sum(not b.ref_cnt for pin in spared for b in pin.blocks.blocks)


def _soft(in_line: bool) -> Callable[[Engine, Away], None]:
    def prepare(engine: Engine, away: Away) -> None:
        set_up(engine, away)
        SoftPins(engine, in_line)

    return prepare


SOFT = tuple(
    replace(
        ours("adaptive", title, name=f"{name}{tier}", has_tier=not tier, role=Role.RELATED),
        prepare=_soft(name == "soft-line"),
    )
    for name, title in (
        ("soft", "adaptive with pins that count as free, kept by their place in the free queue"),
        ("soft-line", "the same, and a turn waits rather than take what is worth more"),
    )
    for tier in ("", "-no-dram")
)
