"""SchedulerSide: vLLM's scheduler hooks for turns. Steps: those for the engine's steps.

It knows turns and programs, asks the policy, and tells pins, tier and queue what follows.
All of it runs on the scheduler's thread; `now` is monotonic seconds, read by connector.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from continuum_connector.config import ContinuumConfig
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.policy.base import After
from continuum_connector.programs.identify import identify_request
from continuum_connector.programs.program import Identity, Kept, Program
from continuum_connector.programs.table import ProgramTable
from continuum_connector.scheduler.decider import Decider, DramWorth
from continuum_connector.scheduler.decisions import Decisions, Snapshots
from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.pins import LivePin, PinEnd
from continuum_connector.scheduler.records import Records, answer
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.room import Room
from continuum_connector.scheduler.stop_strings import Endings
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turn, TurnEnd, Turns

# A preemption costs a prefill; a store in flight ends within milliseconds. Beyond this
# many seconds the store counts as slow and the running turn is preempted after all.
MAX_STORE_WAIT_S = 0.25
# While nothing happens, programs that fall silent and the state file are looked after this often.
LOOK_S = 0.05


@dataclass(frozen=True)
class Parts:
    """What build.py makes of vLLM's configs, for the scheduler half to be put together from."""

    decider: Decider
    pool: BlockPool
    groups: KvGroups
    tier: Tier
    records: Records
    waker: Any
    endings: Endings


class SchedulerSide:
    """Identify, order, match, decide, hold, account. Created once per engine."""

    def __init__(self, config: ContinuumConfig, parts: Parts) -> None:
        decider, pool, self.groups = parts.decider, parts.pool, parts.groups
        self.decider = decider
        self.records = parts.records
        # One block of the pool is the null block, which holds nothing.
        budget = config.max_pinned_fraction * (pool.num_gpu_blocks - 1)
        self.retention = Retention(pool, budget, config.max_ttl_s, self.records, parts.waker)
        self.pins = self.retention.pins
        self.queues = self.retention.queues
        self.programs = ProgramTable(config.max_programs, lambda key: key not in self.pins)
        self.tier = parts.tier
        self._none_found: Mapping[str, int] = dict.fromkeys(self.tier.names, 0)
        self.traffic = self.tier.traffic
        self.turns = Turns()
        held = self.retention, self.tier, self.traffic
        self.snapshots = Snapshots(pool, *held, decider.costs, self.turns)
        self._decisions = Decisions(
            decider, self.snapshots, self.retention, self.tier, self.records
        )
        self._worth = DramWorth(self.programs, decider, self.turns)
        if decider.policy.ranks_dram:
            self.tier.rank = self._worth.rank
        self.room = Room(pool, self.retention, decider, decider.costs, config.max_wait_s)
        self.steps = Steps(self.retention, self.tier, decider, self.records, self.room, parts.waker)
        self.orders = config.order and decider.policy.orders
        self._pool = pool
        self._seen = decider.costs.seen
        self._endings = parts.endings
        self._echo = config.echo
        self._max_head_start_s = config.max_head_start_s

    # --- arrival ----------------------------------------------------------------------
    def begin_turn(self, request: Any, now: float) -> Turn:
        """A turn arrives; idempotent. Its program's pin, if it fits, waits for it."""
        known = self.turns.get(request.request_id)
        if known is not None:
            return known
        self.steps.stir()
        self.steps.expire(now)
        self._endings.expect(request)
        program, identity = self._identify(request, now)
        turn = Turn(
            *(program, identity, program.num_turns, now),
            max_head_start_s=self._max_head_start_s,
            tier_tokens=self._none_found,
        )
        turn.is_stray = turn.strays(request.block_hashes)
        self.turns.begin(request.request_id, turn)
        gap_s = self.decider.arrived(turn, now)
        pin = None if turn.is_stray else self.retention.expect(request, program)
        self.records.arrived(request, turn, pin is not None, gap_s, now)
        return turn

    def _identify(self, request: Any, now: float) -> tuple[Program, Identity]:
        identity, hints = identify_request(request)
        return self.programs.begin_turn(identity, request.block_hashes, now, hints)

    def rank(self, request: Any, is_preempted: bool) -> tuple[Any, ...]:
        """The place of a waiting request; lower is earlier.

        Continuum's order (section 4.3: preempted, pinned, the program's arrival) as far as the
        head start reaches.
        """
        turn = self.turns.get(request.request_id)
        if turn is None:  # it ran already when we were switched on
            return (not is_preempted, math.inf, math.inf)
        pin = self.pins.get(turn.program.key)
        is_ahead = pin is not None and pin.leads(request.request_id)
        return (not is_preempted, turn.place(is_ahead), turn.arrival)

    def victim_rank(self, request: Any) -> tuple[Any, ...]:
        """Among running requests the largest goes first: the turn of the program that came last
        (Continuum, section 4.3), as far as the head start reaches; a last turn stands half of that
        earlier. One that we do not know ran while we were off: it goes before all."""
        turn = self.turns.get(request.request_id)
        if turn is None:
            return (math.inf, math.inf)
        is_last = bool(turn.identity.hints.final) and not turn.is_stray
        return (turn.place(is_last), turn.arrival)

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
        self.steps.stir()
        turn = self.begin_turn(request, now)
        found = self._none_found
        if num_external:
            found = self.tier.load(turn.program.key, request, block_ids, num_external, now)
        if not turn.is_admitted:
            self.turns.admit(request.request_id)
            turn.tier_tokens = found
            self.records.admitted(request, turn, now)
            shared = turn.program.kept.shared(request.block_hashes) * self.groups.hash_size
            self._seen.waited(now - turn.arrival, turn.vram_tokens < shared, now)
        elif turn.is_preempted:
            self.records.happened("readmit", now, turn)
        turn.is_preempted = False
        self.retention.hand_over(turn.program.key, request.request_id, now)

    def make_room(
        self, request: Any, attempt: Callable[[], Any], need: int, others_run: bool, now: float
    ) -> Any:
        """An allocation failed: ask again while pins give way (Room.make)."""
        self.steps.stir()
        turn = self.turns.get(request.request_id)
        return self.room.make(request.request_id, turn, attempt, need, others_run, now)

    def note_preempted(self, request_id: str, now: float) -> None:
        """vLLM put a running turn back."""
        turn = self.turns.get(request_id)
        if turn is not None:
            turn.is_preempted = True
            self.records.happened("preempt", now, turn)

    # --- end of a turn ----------------------------------------------------------------
    def finish(
        self, request: Any, block_ids: Sequence[Sequence[int]], end: TurnEnd, now: float
    ) -> dict[str, Any] | None:
        """A turn is over: decide, hold, and return what the client is told."""
        self.tier.forget_request(request.request_id)
        turn = self.turns.end(request.request_id)
        if turn is None:  # it came before we were switched off and on again
            return None
        self.steps.stir()
        self.room.references_dropped()
        self.retention.unexpect(turn.program.key, request.request_id)
        blocks = self.groups.kept(self._pool.blocks, block_ids, request)
        if end is TurnEnd.ABORTED and not self._endings.went_away(request):
            end = TurnEnd.STOP
        turn.is_stray = turn.strays(request.block_hashes)  # others may have ended since it arrived
        self.programs.end_turn(
            turn.program,
            turn.identity.hints,
            now,
            () if end is TurnEnd.ABORTED else request.block_hashes,
            request.num_prompt_tokens // self.groups.hash_size,
            turn.is_stray,
        )
        if not turn.is_stray and (blocks or end is not TurnEnd.ABORTED):
            num_kept = blocks.end  # the last token has no KV yet
            turn.program.kept = Kept.of(request.block_hashes, num_kept, self.groups.hash_size)
        choice = self._decisions.keep(turn, request, blocks, end, now)
        return answer(turn, choice) if self._echo else None

    def switch(self, is_on: bool, now: float) -> None:
        """Begin to act, or stop: then nothing is kept but what was learned, no turn is known any
        more, and of the copies only loads that requests wait for go on."""
        self.steps.stir()
        if not is_on:
            self.steps.let_go(PinEnd.SWITCHED_OFF, now)
            for turn in filter(None, map(self.turns.end, list(self.turns))):
                self.programs.end_turn(turn.program, turn.identity.hints, now)
            self.decider.forget_open(now)
        if self.groups.rule is not None:
            self.groups.rule.is_on = is_on
        self.records.switched(is_on, now)

    def update_gauges(self, all_of_them: bool) -> None:
        """Set what is a level, not an event; called when the metrics are collected."""
        account = self.records.account
        self.snapshots.update_ledger(account)
        if all_of_them:
            self.records.count_lost()
            account.gauge("programs", len(self.programs))
            self.snapshots.update_gauges(account)


class Steps:
    """What the engine asks in each step: what is due, what leaves, what came."""

    def __init__(
        self,
        retention: Retention,
        tier: Tier,
        decider: Decider,
        records: Records,
        room: Room,
        waker: Any,
    ) -> None:
        self._retention = retention
        self._pins = retention.pins
        self._tier = tier
        self._traffic = tier.traffic
        self._decider = decider
        self._away = decider.away
        self._records = records
        self._outcomes = records.outcomes
        self._room = room
        self._waker = waker
        self._owes_step = False  # metrics show a reset only after a step
        self._idle_until = -math.inf  # what happens sets it back

    def stir(self) -> None:
        """Something happens that the next plan may have to follow."""
        self._idle_until = -math.inf

    def plan(self, now: float) -> StepPlan:
        """One tick: expire what is due, then send everything queued to the workers."""
        self.expire(now)
        for absence in self._away.silent(now):
            self._decider.silent(absence, now)
            self._outcomes.silent(absence, now)
        self._room.new_step(self._decider.new_step(now), now)
        self._owes_step = False
        was_up = self._tier.is_up
        plan = self._traffic.drain(now)
        if not self._tier.is_up:
            at = self._traffic.next_look
            self._waker.set(at if at > now else math.inf, "tier")
        self._record_tier(was_up, now)
        if not len(self._traffic) and not self._decider.is_saving:
            self._idle_until = min(now + LOOK_S, self._pins.next_deadline())
        return plan

    def is_idle(self, now: float) -> bool:
        """Whether `plan` has nothing to do: nothing happened since it last ran, no copy is under
        way and nothing is due. Most steps of a busy server are such."""
        return now < self._idle_until

    def settle(self, report: WorkerReport, now: float) -> None:
        """Take in what the workers saw settle since their last report."""
        self.stir()
        was_up = self._tier.is_up
        self._tier.hear(report)
        for transfer in self._traffic.settle(report, now):
            self._records.settled(transfer, now)
            self._decider.settled(transfer, now)
            self._room.references_dropped()
        self._record_tier(was_up, now)

    def expire(self, now: float) -> None:
        """End the pins that are due. What is not in DRAM yet and should be, goes there."""

        def store(pin: LivePin) -> None:
            if pin.then is After.STORE:
                self._tier.store(pin.program, pin.blocks, now, supersedes=False)

        self._retention.expire(now, before=store)

    def has_work(self, now: float) -> bool:
        """Whether an otherwise idle engine must step: copies to settle, pins to expire,
        or once after a reset, since vLLM sends metrics only with a step."""
        busy = self._traffic.next_look <= now or self._owes_step
        return busy or self._pins.next_deadline() <= now

    def will_free_blocks(self, now: float) -> bool:
        """Whether a store in flight will let go of blocks soon enough to wait for it."""
        age = self._traffic.oldest_store_age(now)
        return age is not None and age < MAX_STORE_WAIT_S

    def reset(self, now: float) -> None:
        """The prefix cache is being reset: end every pin, forget every block in DRAM."""
        self.let_go(PinEnd.RESET, now)
        self._records.happened("reset", now)

    def let_go(self, cause: PinEnd, now: float) -> None:
        """End every pin for that cause, and forget every block in DRAM."""
        self.stir()
        self._retention.end_all(cause, now)
        for transfer in self._tier.reset(now):
            self._records.settled(transfer, now)
        self._owes_step = True

    def shutdown(self, now: float) -> None:
        """The server stops: end every pin, close what has threads. Idempotent."""
        self._retention.end_all(PinEnd.SHUTDOWN, now)
        self._waker.close()
        self._decider.close()
        self._records.close(now)

    def _record_tier(self, was_up: bool, now: float) -> None:
        if was_up and not self._tier.is_up:
            self._records.happened("tier_down", now, reason=self._tier.down_reason)
