"""SchedulerSide: vLLM's scheduler hooks, in the order in which the engine calls them.

It knows turns and programs, asks the policy, and tells pins, tier and queue what follows.
All of it runs on the scheduler's thread; `now` is monotonic seconds, read by connector.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from continuum_connector.account import Account
from continuum_connector.config import ContinuumConfig
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.policy.base import (
    After,
    Decision,
    FinishedTurn,
    Free,
    Offload,
    RetentionPolicy,
    Snapshot,
)
from continuum_connector.policy.base import Pin as PinDecision
from continuum_connector.programs.identify import identify, read_hints
from continuum_connector.programs.program import Identity, Program
from continuum_connector.programs.table import ProgramTable
from continuum_connector.scheduler.ending import Endings
from continuum_connector.scheduler.holds import BlockPool, HoldTable
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.pins import Pin, PinEnd, PinTable
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.room import Room
from continuum_connector.scheduler.tier import DramTier
from continuum_connector.scheduler.turn import Turn
from continuum_connector.scheduler.unattached import Unattached

# A preemption costs a prefill; a store in flight ends within milliseconds. Beyond this
# many seconds the store counts as slow and the running turn is preempted after all.
MAX_STORE_WAIT_S = 0.25


class SchedulerSide:
    """Identify, order, match, decide, hold, account. Created once per engine."""

    def __init__(
        self,
        config: ContinuumConfig,
        policy: RetentionPolicy,
        pool: BlockPool,
        groups: KvGroups,
        make_tier: Callable[[HoldTable], DramTier],
        account: Account,
        trace: Any,
        waker: Any,
        endings: Endings,
    ) -> None:
        self.config = config
        self.policy = policy
        self.records = Records(account, trace, config.echo)
        self.pins = PinTable()
        self.programs = ProgramTable(config.max_programs, lambda key: not self.pins.has(key))
        self.pin_holds = HoldTable(pool)
        self.store_holds = HoldTable(pool)
        self.tier = make_tier(self.store_holds)
        self.turns: dict[str, Turn] = {}
        self.queues: Sequence[Any] = ()
        self._pool = pool
        self.groups = groups
        self._endings = endings
        self._waker = waker
        self._now = 0.0
        self._owes_step = False  # metrics show a reset only after a step
        self.room = Room(pool, self.pins, self.pin_holds, self._give_up)
        self.unattached = Unattached(pool, groups, self.give_up_cheapest)

    # --- arrival ----------------------------------------------------------------------
    def begin_turn(self, request: Any, now: float) -> Turn:
        """A turn arrives; idempotent. Its program's pin, if it fits, waits for it."""
        known = self.turns.get(request.request_id)
        if known is not None:
            return known
        self.expire(now)
        self._endings.expect(request)
        program, identity = self._identify(request, now)
        turn = Turn(program, identity, program.num_turns, now)
        self.turns[request.request_id] = turn
        pin = self.pins.get(program.key)
        if pin is not None and self._continues(request, pin):
            self.pins.expect(pin, request.request_id)
            self._schedule_wake()
        self.records.arrived(request, turn, pin, now)
        return turn

    def _identify(self, request: Any, now: float) -> tuple[Program, Identity]:
        params = request.sampling_params
        extra = params.extra_args if params is not None else None
        session = getattr(request, "session_id", None)  # vLLM >= 0.28
        identity = identify(request.kv_transfer_params, extra, session)
        hints = None if identity else read_hints(request.kv_transfer_params, extra)
        return self.programs.begin_turn(
            identity, request.request_id, request.block_hashes, now, hints
        )

    def rank(self, request: Any, is_preempted: bool) -> tuple[Any, ...]:
        """The place of a waiting request (Continuum, section 4.3); lower is earlier."""
        turn = self.turns.get(request.request_id)
        if turn is None:
            return (True, True, self._now, self._now)
        pin = self.pins.get(turn.program.key)
        returns = pin is not None and request.request_id in pin.waiting
        return (not is_preempted, not returns, turn.program.arrival, turn.arrival)

    def program_of(self, request: Any) -> str:
        turn = self.turns.get(request.request_id)
        return turn.program.key if turn is not None else request.request_id

    # --- admission --------------------------------------------------------------------
    def match(self, request: Any, num_vram_tokens: int, now: float) -> tuple[int, bool]:
        """How many tokens beyond VRAM's hit a load can bring, and whether it is async."""
        turn = self.begin_turn(request, now)
        if not turn.is_admitted:
            turn.vram_tokens = num_vram_tokens
        num_tokens = self.tier.find(request, num_vram_tokens)
        return num_tokens, num_tokens > 0

    def after_alloc(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int, now: float
    ) -> None:
        """The request owns its blocks now: load what it lacks, hand the pin over."""
        turn = self.begin_turn(request, now)
        if num_external:
            self.tier.load(turn.program.key, request, block_ids, num_external, now)
        if not turn.is_admitted:
            turn.is_admitted = True
            turn.dram_tokens = num_external
            self.records.admitted(request, turn, now)
        pin = self.pins.get(turn.program.key)
        if pin is not None and request.request_id in pin.waiting:
            self._end_pin(pin, PinEnd.RETURNED, now)

    def make_room(self, request: Any, attempt: Callable[[], Any], need: int, now: float) -> Any:
        """Retry a failed allocation while pins give way; None if that cannot help."""
        self._now = now
        turn = self.turns.get(request.request_id)
        own = self.pins.get(turn.program.key) if turn is not None else None
        if own is not None and request.request_id not in own.waiting:
            own = None
        return self.room.make(attempt, request.request_id, need, own)

    def give_up_cheapest(self, now: float) -> bool:
        """End the pin that gives way first; False if there is none."""
        pins = self.pins.cheapest_first()
        cheapest = next(pins, None)
        pins.close()
        if cheapest is None:
            return False
        self._end_pin(cheapest, PinEnd.PRESSURE, now)
        return True

    def will_free_blocks(self, now: float) -> bool:
        """Whether a store in flight will let go of blocks soon enough to wait for it."""
        if not self.store_holds.num_blocks:
            return False
        age = self.tier.oldest_store_age(now)
        return age is not None and age < MAX_STORE_WAIT_S

    @property
    def waits_for_room(self) -> bool:
        """Whether turns are there, and no copy that one of them may be waiting for."""
        return bool(self.turns) and not len(self.tier.ledger)

    def note_preempted(self, request_id: str, now: float) -> None:
        """vLLM put a running turn back."""
        turn = self.turns.get(request_id)
        if turn is not None:
            self.records.preempted(turn, now)

    # --- every step -------------------------------------------------------------------
    def plan(self, now: float) -> StepPlan:
        """One tick: expire what is due, then send everything queued to the workers."""
        self.expire(now)
        self.room.new_step()
        self._owes_step = False
        return self.tier.drain(now)

    def settle(self, report: WorkerReport, now: float) -> None:
        """Take in what the workers saw settle since their last report."""
        was_up = self.tier.is_up
        for transfer in self.tier.settle(report, now):
            self.records.settled(transfer, now)
            self.room.references_dropped()
        if was_up and not self.tier.is_up:
            self.records.trace.record("tier_down", now, reason=self.tier.down_reason)

    def update_gauges(self) -> None:
        """Set what is a level, not an event; called when the metrics are collected."""
        self.records.count_lost()
        account = self.records.account
        account.gauge("pins_live", len(self.pins))
        account.gauge("pinned_blocks", self.pin_holds.num_blocks)
        account.gauge("held_blocks", self.pin_holds.num_blocks + self.store_holds.num_blocks)
        account.gauge("programs", len(self.programs))
        self.tier.update_gauges()

    def expire(self, now: float) -> None:
        """End the pins that are due. What is not in DRAM yet and should be, goes there."""
        self._now = now
        if self.pins.next_deadline() > now:
            return
        for pin in self.pins.due(now):
            if pin.then is After.STORE:
                self.tier.store(pin.program, pin.blocks, now)
            self._end_pin(pin, PinEnd.EXPIRED, now)
        self._schedule_wake()

    def has_work(self, now: float) -> bool:
        """Whether an otherwise idle engine must step: copies to settle, pins to expire,
        or once after a reset, since vLLM sends metrics only with a step."""
        busy = bool(len(self.tier.ledger)) or self._owes_step
        return busy or self.pins.next_deadline() <= now

    # --- end of a turn ----------------------------------------------------------------
    def finish(
        self, request: Any, block_ids: Sequence[Sequence[int]], aborted: bool, now: float
    ) -> dict[str, Any] | None:
        """A turn is over: decide, hold, and return what the client is told."""
        turn = self.turns.pop(request.request_id, None)
        if turn is None:
            return None
        self.tier.forget_request(request.request_id)
        self.room.references_dropped()
        self._unexpect(turn.program.key, request.request_id)
        blocks = self.groups.hashed_blocks(self._pool.blocks, block_ids, request.block_hashes)
        aborted = aborted and self._endings.went_away(request)
        self.programs.end_turn(
            request.request_id,
            now,
            () if aborted else request.block_hashes,
            request.num_prompt_tokens // self.groups.block_size,
        )
        finished = FinishedTurn(
            program=turn.program.key,
            turn=turn.number,
            num_tokens=request.num_tokens,
            num_blocks=len(blocks),
            hints=turn.identity.hints,
            aborted=aborted,
        )
        decision, why = self.policy.decide(finished, self._snapshot(now))
        if isinstance(decision, PinDecision) and len(blocks) > self._budget():
            # It would push every other pin out before it gave way itself.
            decision = Offload() if decision.then is After.STORE else Free()
            why = "larger than max_pinned_fraction of VRAM"
        self._carry_out(decision, turn, request, blocks, now)
        self.records.decided(turn, finished, decision, why, now)
        self._schedule_wake()
        return self.records.answer(turn, decision)

    def reset(self, now: float) -> None:
        """The prefix cache is being reset: end every pin, forget every block in DRAM."""
        for pin in self.pins:
            self._end_pin(pin, PinEnd.RESET, now)
        for transfer in self.tier.reset(now):
            self.records.settled(transfer, now)
        self._owes_step = True
        self._schedule_wake()
        self.records.trace.record("reset", now)

    def shutdown(self, now: float) -> None:
        """The server stops: end every pin, close what has threads. Idempotent."""
        for pin in self.pins:
            self._end_pin(pin, PinEnd.SHUTDOWN, now)
        self._waker.close()
        self.records.trace.record("stop", now)
        self.records.trace.close()

    # --- parts ------------------------------------------------------------------------
    def _carry_out(
        self, decision: Decision, turn: Turn, request: Any, blocks: list[Any], now: float
    ) -> None:
        key = turn.program.key
        if isinstance(decision, PinDecision):
            self._pin(decision, turn, request, blocks, now)
            if decision.then is After.STORE:
                self.tier.store(key, blocks, now, request)
            return
        if isinstance(decision, Offload):
            self.tier.store(key, blocks, now, request)
        pin = self.pins.get(key)
        is_final = turn.identity.hints.final is True
        if pin is not None and (is_final or isinstance(decision, Offload)):
            cause = PinEnd.PROGRAM_DONE if is_final else PinEnd.SUPERSEDED
            self._end_pin(pin, cause, now)
        if is_final:
            self.tier.index.demote(key)

    def _pin(
        self, decision: PinDecision, turn: Turn, request: Any, blocks: list[Any], now: float
    ) -> None:
        old = self.pins.get(turn.program.key)
        hold = self.pin_holds.take([block for _, _, block in blocks])
        if old is not None:
            self._end_pin(old, PinEnd.SUPERSEDED, now)
        probe = blocks[-1][0] // 2  # the chain's middle: see Pin
        ttl_s = min(decision.ttl_s, self.config.max_ttl_s)
        pin = Pin(
            program=turn.program.key,
            hold=hold,
            blocks=tuple(blocks),
            started=now,
            deadline=now + ttl_s,
            then=decision.then,
            rank=(decision.value, -turn.program.arrival),
            probe_index=probe,
            probe_hash=request.block_hashes[probe],
        )
        self.pins.add(pin)
        self.records.pin_began()
        self._keep_budget(now)
        self._rerank(pin.program)

    def _keep_budget(self, now: float) -> None:
        """Pins above `max_pinned_fraction` of VRAM give way, cheapest first."""
        while self.pin_holds.num_blocks > self._budget():
            self.give_up_cheapest(now)

    def _budget(self) -> float:
        """VRAM blocks that pins may keep; one block of the pool is the null block."""
        return self.config.max_pinned_fraction * (self._pool.num_gpu_blocks - 1)

    def _end_pin(self, pin: Pin, cause: PinEnd, now: float) -> None:
        self.pin_holds.release(pin.hold)
        self._note_end(pin, cause, now)

    def _give_up(self, pin: Pin) -> None:
        """Room released the pin's blocks; the rest of its end is ours."""
        self.pin_holds.settle_trial(pin.hold)
        self._note_end(pin, PinEnd.PRESSURE, self._now)

    def _note_end(self, pin: Pin, cause: PinEnd, now: float) -> None:
        self.pins.remove(pin, cause)
        self.records.pin_ended(pin, cause.value, now)
        self._rerank(pin.program)

    def _unexpect(self, program: str, request_id: str) -> None:
        pin = self.pins.get(program)
        if pin is not None and request_id in pin.waiting:
            self.pins.unexpect(pin, request_id)
            self._rerank(program)

    def _rerank(self, program: str) -> None:
        for queue in self.queues:
            queue.rerank(program)

    def _schedule_wake(self) -> None:
        self._waker.set(self.pins.next_deadline())

    @staticmethod
    def _continues(request: Any, pin: Pin) -> bool:
        hashes = request.block_hashes
        return len(hashes) > pin.probe_index and hashes[pin.probe_index] == pin.probe_hash

    def _snapshot(self, now: float) -> Snapshot:
        return Snapshot(
            now=now,
            num_blocks=self._pool.num_gpu_blocks - 1,  # one is the null block
            num_free_blocks=self._pool.get_num_free_blocks(),
            num_pinned_blocks=self.pin_holds.num_blocks,
            num_waiting=sum(len(queue) for queue in self.queues),
            has_tier=self.tier.is_up,
        )
