"""Hooks: all that is ours in one vLLM scheduler; the subclass in attach.py calls it.

Allocation: vLLM's allocate_slots, in which pins give way, put in place only where it may fail.
Order: which turn is admitted and which is preempted first. KvFirst, end_lost_loads: turns that wait
with KV, and those that lost it. Resets are in resets.py.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.queue import Front, ProgramQueue
from continuum_connector.vllm import compat, touched
from continuum_connector.vllm.resets import Resets
from continuum_connector.vllm.touched import Part


class Hooks:
    """The parts of ours in one scheduler. `order` is None if vLLM's own order stays."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        """Put our parts into a scheduler that has just been built; `ours`: our connector in it."""
        compat.look_up_as_without_connector(scheduler)
        if scheduler.connector is ours:  # loads of another connector may need what this would undo
            compat.free_blocks_at_once(scheduler)
        self._scheduler = scheduler
        self._ours = ours
        side = ours.side
        self._queues = side.queues
        self.order = Order(scheduler, ours) if side.orders else None
        self.allocation = Allocation(scheduler, ours)
        self.resets = Resets(scheduler, ours)
        self._kv_first = KvFirst(scheduler)
        # Of a vLLM that lacks what these need, no turn loads, and no user's priority ranks turns.
        self._may_load = not touched.is_off(Part.TIER)
        self._may_forget = not touched.is_off(Part.PRIORITY)

    @property
    def acting(self) -> Any:
        """Our connector; None while it is switched off."""
        return self._ours if self._ours.is_on else None

    def end_program(self, said: Mapping[str, Any]) -> bool:
        """An operator says that a program is over; False if we do not know it."""
        ours = self.acting
        return ours is not None and bool(ours.end_program(str(said.get("end_program"))))

    def before_step(self) -> None:
        """Do what must be done before vLLM looks at any turn of the coming step."""
        self.resets.before_step()
        if self._may_load and (lost := compat.lost_loads(self._scheduler)):
            ours = self.acting
            before_queued = ours.before_queued if ours is not None else None
            end_lost_loads(self._scheduler, lost, before_queued)
        self._kv_first.new_step()
        must_line_up = self.allocation.before_step()
        if self.order is not None:
            self.order.open()
            if must_line_up:
                self.order.line_up(self.allocation.num_short())

    def before_preemption(self, request: Any) -> None:
        if self._may_forget:
            compat.forget_uncomputed(self._scheduler, request)

    def after_step(self) -> None:
        if self.order is not None:
            self.order.close()

    def next_queue(self, own: Callable[[], Any]) -> Any:
        """vLLM <= 0.30: return the queue that is asked next; `own` is vLLM's own answer.

        A turn that holds KV goes first, or it could wait for ever behind a turn that needs the
        blocks it holds. This is so in vLLM's own order, too, where a priority may rank that other
        turn first, and while we are switched off, because loads that were under way still settle.
        """
        self.allocation.before_admission()
        order = self.order
        if order is not None and order.is_on:
            return self._queues.first()
        return self._kv_first.front() or own()


STOPPED = getattr(RequestStatus, "FINISHED_STOPPED", None)


def ends_session(known: Any, request: Any) -> bool:
    """Whether the request only says that the streaming session `known` gets no more input, and that
    has been answered.

    vLLM then ends the session as it does one whose client went away (Scheduler.add_request).
    """
    idle = getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)
    if known is None or idle is None or STOPPED is None:
        return False
    return known.status == idle and not getattr(request, "resumable", True)


# --- allocation -------------------------------------------------------------------------
class Allocation:
    """KVCacheManager.allocate_slots of one scheduler, vLLM's own or ours.

    vLLM calls the function for every running request in every step, so one more Python call there
    costs more than all our other hooks. Before each step we therefore decide whether an allocation
    of a running request can fail at all. If none can, vLLM's own function stays in place until a
    waiting turn is to be admitted, because a whole prompt needs room.
    """

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        side = ours.side
        self._pins, groups = side.retention.holds, side.groups
        self._own = self._manager.allocate_slots
        self._rule = groups.rule
        self._with_room = _with_room(self._own, scheduler, ours, groups)
        self._ours = ours
        self._num_blocks = groups.num_blocks
        self._lookahead = scheduler.num_lookahead_tokens
        # The most blocks that a step takes, and that each running turn takes beside its share.
        self._most_per_step = groups.num_blocks(scheduler.max_num_scheduled_tokens)
        self._most_per_turn = groups.most_new + groups.num_blocks(self._lookahead)
        # Whether schedule() calls a method of its own before it allocates for a turn that waits.
        own = type(scheduler).__base__
        self._hears_of_admission = hasattr(own, "_select_waiting_queue_for_scheduling") or hasattr(
            own, "_handle_blocked_waiting_request"
        )
        # vLLM's own is a method of the class, unless somebody else has already replaced it.
        self._is_method = getattr(self._own, "__func__", None) is type(self._manager).allocate_slots
        self._manager.allocate_slots = self._with_room
        self._is_ours = True

    def before_step(self) -> bool:
        """Put in place the function that the coming step needs. Returns whether a running request
        may find no block in that step even if every pin gives way, so that a turn is preempted."""
        if not self._ours.is_on:
            self._put_in_place(False)
            return False
        num_running, free = len(self._scheduler.running), self._pool.get_num_free_blocks()
        most = self._most_per_step + num_running * self._most_per_turn
        self._put_in_place(free < most or not self._hears_of_admission)
        # The spare blocks of running turns are counted only where they may matter.
        return bool(free + self._pins.num_blocks < most and free + self._num_giving_way < most)

    def before_admission(self) -> None:
        """The step has served all running turns; vLLM looks at a waiting one next."""
        if not self._is_ours:
            self._put_in_place(self._ours.is_on)

    def num_short(self) -> int:
        """How many blocks running requests will lack in the coming step, counted for each."""
        room = self._pool.get_num_free_blocks() + self._num_giving_way
        return max(0, self._wanted(self._scheduler.running) - int(room))

    @property
    def _num_giving_way(self) -> int:
        """How many blocks that we hold, or make running turns keep, go before any is preempted."""
        return int(
            self._pins.num_blocks + (self._rule.count_spare() if self._rule is not None else 0)
        )

    def _put_in_place(self, is_ours: bool) -> None:
        if is_ours is self._is_ours:
            return
        self._is_ours = is_ours
        if is_ours:
            self._manager.allocate_slots = self._with_room
        elif self._is_method:  # an attribute of the instance makes every call slower
            del self._manager.allocate_slots
        else:
            self._manager.allocate_slots = self._own

    def _wanted(self, running: Sequence[Any]) -> int:
        """How many blocks the running requests will ask for (v1/core/sched/scheduler.py,
        schedule()). Prompts share the step's tokens, each cut to the threshold. Every request that
        decodes is counted, although prompts before it may use up the tokens."""
        num_blocks, budget = 0, self._scheduler.max_num_scheduled_tokens
        longest = compat.longest_chunk(self._scheduler) or budget
        for request in running:
            computed = request.num_computed_tokens
            new = request.num_tokens_with_spec + request.num_output_placeholders - computed
            if request.is_prefill_chunk:
                new = min(new, longest, budget)
                budget -= new
            num_blocks += self._num_blocks(computed + new + self._lookahead)
            num_blocks -= self._num_blocks(computed)
        return num_blocks


def _with_room(
    allocate: Callable[..., Any], scheduler: Any, ours: Any, groups: KvGroups
) -> Callable[..., Any]:
    """Wrap KVCacheManager.allocate_slots so that pins give way before it returns None. For a
    running turn, the spare blocks of running turns give way before the pins do."""
    signature, rule = inspect.signature(allocate), groups.rule
    if rule is not None:
        rule.give_way()

    def retry(request: Any, args: Any, kwargs: Any) -> Any:
        attempt = functools.partial(allocate, request, *args, **kwargs)
        need, blocks = 0, None  # a running request needs a block or so, and is preempted without it
        if compat.is_waiting(request):
            call = signature.bind(request, *args, **kwargs).arguments
            if rule is not None and rule.waits_for_step(call.get("new_computed_blocks")):
                return None
            need = blocks_needed(call, groups)
        elif rule is not None:
            # Running turns give up, one by one, what only their next turns would read. Admitting a
            # turn is not worth these few blocks, without which a context is not found.
            while blocks is None and rule.give_up_spare(scheduler.requests):
                blocks = attempt()
        if blocks is not None:
            return blocks
        return ours.make_room(request, attempt, need, bool(scheduler.running))

    @functools.wraps(allocate)
    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        return retry(request, args, kwargs) if blocks is None else blocks

    return allocate_slots


def blocks_needed(call: Mapping[str, Any], groups: KvGroups) -> int:
    """Return a lower bound of the blocks that a waiting request's allocation takes.

    `call`: the arguments of KVCacheManager.allocate_slots. Full-attention groups count, and one
    block for each group of states; what a window or a chunk needs depends on what may be skipped.
    A request that holds blocks may hold more than its computed tokens fill, as after a load that
    failed half way.
    """
    request = call["request"]
    if request.num_computed_tokens:
        return 1
    found = call.get("num_new_computed_tokens", 0)
    total = found + call.get("num_external_computed_tokens", 0) + call["num_new_tokens"]
    if call.get("full_sequence_must_fit"):
        total = max(total, request.num_tokens)
    num_full = groups.num_full_blocks(total) - groups.num_full_blocks(found)
    return max(1, num_full + groups.num_states)


# --- order of admission and preemption --------------------------------------------------
class Order:
    """Program order, for as long as it is switched on.

    Our queues replace vLLM's, which come back while we are switched off. vLLM chooses the victims
    itself, from the end of `running`; we only change the order of `running`.
    """

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._ours = ours
        self._side = ours.side
        self._waits, self._queues = ours.side.waits, ours.side.queues
        names = "waiting", "skipped_waiting"  # the latter: vLLM <= 0.30
        self._stock = {each: getattr(scheduler, each) for each in names if hasattr(scheduler, each)}
        # The user's own priorities rank before our order, and alone decide the victims.
        self._has_priorities = scheduler.policy.value == "priority"
        self.is_on = False
        self.switch(True)

    def switch(self, is_on: bool) -> None:
        """Make turns wait in program order, or in vLLM's. When it becomes vLLM's, turns that wait
        already keep their places under fcfs, and are ordered by priority otherwise. Call it
        between two admissions, not within one."""
        self.is_on = is_on
        if is_on:
            self._take_over()
        else:
            self._give_back()

    def open(self) -> None:
        """Before a step, let in the turns that may begin by now, and ask again those that are next
        in line for the bus."""
        if self.is_on and self._waits.are_due():
            self._ours.let_in(self._scheduler.num_waiting_for_streaming_input)

    def close(self) -> None:
        """After a step: turns at the gate, or without an adapter's place, wait because we hold
        them, so they are no backlog."""
        if self.is_on and (held := list(self._waits.held())):
            requests = map(self._scheduler.requests.get, held)
            compat.count_no_backlog(self._scheduler, filter(None, requests))

    def line_up(self, num_short: int) -> None:
        """Put the turns that vLLM shall preempt for `num_short` blocks at the end of `running`.

        Call it before a step that lacks so many. vLLM serves `running` from its front and takes
        victims from its end, so no victim was scheduled in the same step. (Its rule for priorities
        takes victims from anywhere and rolls them back; their blocks are then free and can be
        found, although they were not computed.) All other turns stay where they are: in another
        order, a long prompt might take the step's tokens from turns that decode, or wait behind
        later turns for ever.
        """
        if not self.is_on or self._has_priorities:
            return
        side, running = self._side, self._scheduler.running
        ranked = sorted(running, key=side.victim_rank)
        victims: list[Any] = []
        while num_short > 0 and len(ranked) > 1:
            victims.append(ranked.pop())
            num_short -= side.groups.least_blocks(victims[-1].num_computed_tokens)
        gone = {request.request_id for request in victims}
        running[:] = [each for each in running if each.request_id not in gone] + victims[::-1]

    def _take_over(self) -> None:
        """Put queues of ours in the place of vLLM's, whose order is nobody's to choose."""
        ours = self._ours
        rank = functools.partial(ours.rank, by_priority=self._has_priorities)
        has_gate = not self._has_priorities
        queues: list[ProgramQueue] = []
        for name, stock in self._stock.items():
            for request in stock:  # they came while we were off
                ours.before_queued(request)
            # New turns join the first queue, or the other one (<= 0.30) if they wait for a grammar.
            queue = self._waits.make_queue(rank, _is_new, has_gate)
            _move(stock, queue)
            setattr(self._scheduler, name, queue)
            queues.append(queue)
        self._queues.use(queues)

    def _give_back(self) -> None:
        """Put vLLM's own queues back, with those that wait."""
        self._ours.let_all_in()
        self._queues.use(())
        for name, stock in self._stock.items():
            _move(getattr(self._scheduler, name), stock)
            setattr(self._scheduler, name, stock)


def _is_new(request: Any) -> bool:
    """Whether it has never run."""
    return not (compat.is_preempted(request) or compat.holds_kv(request))


def _move(source: Any, target: Any) -> None:
    while source:
        target.add_request(source.pop_request())


def end_lost_loads(
    scheduler: Any, requests: Iterable[Any], before_queued: Callable[[Any], None] | None
) -> None:
    """Before a step, make the turns that have lost what they loaded wait like turns without KV.

    Such a turn may need blocks of turns that wait with KV. vLLM lets it keep its place among them,
    where it could keep vLLM from looking at them for ever: a prompt takes more blocks of a window's
    group than its load did, and vLLM kept free only those of the load. `before_queued` names the
    program of a turn that came while we were switched off; it is None while we are.
    """
    for request in requests:
        compat.end_load(scheduler, request)
        if before_queued is not None:
            before_queued(request)
        compat.wait_without_kv(scheduler, request)


class KvFirst:
    """vLLM <= 0.30: finds the turns that wait with KV, which are to be admitted first.

    They are looked for once a step, although vLLM asks before each admission. A step puts the turns
    that it skips back only at its end, so none joins meanwhile, and a turn that it admits is taken
    off.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._holders: deque[Any] | None = None  # of this step; None until they are looked for

    def new_step(self) -> None:
        self._holders = None

    def front(self) -> Front | None:
        """Return a queue with these turns at its front; None if there are none."""
        if self._holders is None:
            self._holders = deque(filter(compat.holds_kv, self._scheduler.skipped_waiting))
        return Front(self._scheduler.skipped_waiting, self._holders) if self._holders else None
