"""SchedulerSide: vLLM's scheduler hooks for turns, from a turn's arrival to its end. Steps: those
for the engine's steps, which handle what is due, send plans to the workers and take in reports.

It knows turns and programs, asks the policy, and tells pins, tier and queue what to do.
All of it runs on the scheduler's thread; `now` is monotonic seconds, read by connector.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from continuum_connector.config import ContinuumConfig
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.policy.base import After
from continuum_connector.programs.continuation import Kept, PromptText
from continuum_connector.programs.identify import identify_request
from continuum_connector.programs.program import Answers, Interruptions, ProgramTable
from continuum_connector.scheduler.decisions import Decider, Decisions, DramWorth, Snapshots
from continuum_connector.scheduler.epochs import AdapterNames, Cause, Epochs
from continuum_connector.scheduler.holds import BlockPool, HoldTable, num_usable
from continuum_connector.scheduler.kv_groups import NO_BLOCKS, ChainBlocks, KvGroups, ids_of
from continuum_connector.scheduler.pins import Retention, Room
from continuum_connector.scheduler.queue import Queues
from continuum_connector.scheduler.records import Records, answer
from continuum_connector.scheduler.stock import Balance, UnknownStock
from continuum_connector.scheduler.tiers.base import RankAt, Tier
from continuum_connector.scheduler.tiers.traffic import Traffic
from continuum_connector.scheduler.turns import (
    BY_ITSELF,
    Absence,
    LivePin,
    PinEnd,
    State,
    Turn,
    TurnEnd,
    Turns,
    strays,
)
from continuum_connector.scheduler.waits import Adapters, Bus, FromBelow, Gate, SameLoad, Waits
from continuum_connector.toolcalls import ToolReader


class SchedulerSide:
    """Identify, order, match, decide, hold, account. Created once per engine."""

    def __init__(
        self,
        config: ContinuumConfig,
        decider: Decider,
        pool: BlockPool,
        groups: KvGroups,
        traffic: Traffic,
        make_tier: Callable[[RankAt | None, Callable[[str], bool]], Tier],
        records: Records,
        stock: UnknownStock,
        waker: Any,
        reader: ToolReader,
        max_loras: int,
        max_running: int,
        pop_blocks: Callable[[str], list[Any]] | None,
        is_vram_empty: Callable[[], bool],
    ) -> None:
        """`make_tier`: makes what lies below VRAM, given the worth of chains and whether a turn of
        a program waits. `stock`: what stock vLLM would have kept, to tell beside what we found.
        `pop_blocks`: a request's blocks, which vLLM frees no more; None where it
        must free them itself."""
        costs, policy = decider.costs, decider.policy
        self.decider, self.groups, self.records, self.traffic = decider, groups, records, traffic
        self._pool, self._pop_blocks = pool, pop_blocks
        self._reader = reader
        self._stock, self._away, self._costs = stock, decider.away, costs
        self._ended = HoldTable(pool, beside=traffic.holds)
        self._echo = config.echo
        self._max_head_start_s = config.max_head_start_s
        self._answers, self._interruptions = Answers(groups.hash_size), Interruptions()
        self.orders = config.max_head_start_s > 0 and policy.orders
        self.turns = Turns()
        self.adapter_names = AdapterNames()
        self.queues = Queues()
        # What keeps blocks in VRAM, and the table of the programs that they belong to.
        self.retention = Retention(
            HoldTable(pool, beside=traffic.holds),
            config.max_pinned_fraction * num_usable(pool),
            config.max_ttl_s,
            records,
            self.queues,
            waker,
        )
        self.pins = pins = self.retention.pins
        self.programs = ProgramTable(config.max_programs, lambda key: key not in pins)
        # What lies below it.
        self._worth = DramWorth(self.programs, decider, self.turns)
        self._heeds_stock = policy.heeds_stock
        self._lends = policy.ranks_dram  # others go by last use, whoever has what
        rank_at = self._worth.rank_at if policy.ranks_dram else None
        self.tier = tier = make_tier(rank_at, self.turns.has_waiting)
        self._nothing_below: Mapping[str, int] = dict.fromkeys(tier.names, 0)
        self._none_found: Mapping[str, int] = {"vram": 0, **self._nothing_below}
        # All that a turn may wait for, besides room.
        vram = num_usable(pool)
        gate = Gate(
            config.gate_wait_s if self.orders else 0.0,
            lambda: max(vram, tier.num_blocks),
            groups.least_blocks,
            costs,
            decider.away,
            config.max_programs,
            records.account,
        )
        from_below = FromBelow(tier, pool, self.turns, groups.hash_size)
        same_load = SameLoad(tier, self.turns, groups.hash_size)
        bus = Bus(traffic, costs, self.queues, self.turns, max_running)
        adapters = Adapters(max_loras, tier, self.turns)
        self.waits = Waits(
            gate, from_below, same_load, bus, adapters, self.queues, self.turns, records
        )
        # What decides on finished turns, and what makes room.
        self._max_running = max_running
        self._balance = Balance(vram * groups.hash_size, self._has_load)
        self.snapshots = Snapshots(
            pool, self.retention, tier, costs, self.turns, bus, self._balance
        )
        self._decisions = Decisions(
            decider, self.snapshots, self.retention, tier, records, groups.are_simple
        )
        self.room = Room(pool, self.retention, decider.worth_now, costs)
        self._epochs = Epochs(self.retention, tier, records, stock, is_vram_empty)
        self.steps = Steps(
            self._epochs, self.retention, tier, decider, reader, records, self.room, waker
        )

    # --- arrival ----------------------------------------------------------------------
    def begin_turn(self, request: Any, now: float) -> Turn:
        """A turn arrives; idempotent. Its program's pin waits for it, if the turn continues the
        pinned chain."""
        known = self.turns.get(request.request_id)
        if known is not None:
            return known
        self.steps.note_change()
        self.steps.expire(now)
        if self.adapter_names.arrived(request):
            self.steps.new_epoch(Cause.WEIGHTS, now, "lora_request")
        self._reader.arrived(request)
        text = PromptText(request.prompt_token_ids)
        turn = self._recognise(request, text, now)
        program = turn.program
        if program.num_active > 1:
            self.tier.take_back(program.key)
        self.turns.begin(turn)
        gap_s = self.decider.arrived(turn, now)  # first: its program's chains are no longer away
        self.waits.from_below.bring_up(turn, request, now)
        returns = not turn.is_stray and self.retention.expect(turn, request.block_hashes, text)
        self.records.arrived(request, turn, returns, gap_s, now)
        return turn

    def _recognise(self, request: Any, text: PromptText, now: float) -> Turn:
        """Whose turn it is, and what of its program it continues."""
        identity, hints = identify_request(request)
        hashes, num_tokens = request.block_hashes, request.num_prompt_tokens
        program, identity = self.programs.begin_turn(
            identity, hashes, now, hints, num_tokens, text.tokens
        )
        is_stray, since, diverged = strays(program, identity, hashes, text), None, None
        num_common, may_begin_alike = None, False
        if not is_stray:
            since = program.left_by(hashes, text)
            num_common = program.num_common(since, hashes, text)
            if num_common is not None:  # else it may be another conversation
                self._interruptions.came_back(program, since, num_tokens)
            may_begin_alike = num_common is None and program.may_begin_alike(since, hashes)
            diverged = program.differs(since, identity, request, self.groups.hash_size)
            self._answers.came_back(program, hashes)
        return Turn(
            request.request_id,
            program,
            identity,
            number=program.num_turns,
            arrival=now,
            num_prompt_tokens=num_tokens,
            is_stray=is_stray,
            since=since,
            num_common=num_common,
            may_begin_alike=may_begin_alike,
            diverged=diverged,
            # It may already have KV, if it came while we were switched off.
            epoch=self._epochs.of_kv(request.num_computed_tokens),
            hit_tokens=self._none_found,
        )

    def rank(self, request: Any, is_preempted: bool) -> tuple[Any, ...]:
        """The place of a waiting request; lower is earlier.

        This is Continuum's order (section 4.3: preempted, pinned, the program's arrival), within
        the bounds of the head start.
        """
        turn = self.turns.get(request.request_id)
        if turn is None:  # it ran already when we were switched on
            return (not is_preempted, math.inf, math.inf)
        return (not is_preempted, turn.place(self._max_head_start_s), turn.arrival)

    def victim_rank(self, request: Any) -> tuple[Any, ...]:
        """The rank of a running request as a victim: the largest is preempted first.

        That is the turn of the program that came last (Continuum, section 4.3), within the bounds
        of the head start. A request that we do not know ran while we were off, and is preempted
        before all others.
        """
        turn = self.turns.get(request.request_id)
        if turn is None:
            return (math.inf, math.inf)
        return (turn.victim_place(self._max_head_start_s), turn.arrival)

    # --- admission --------------------------------------------------------------------
    def match(self, request: Any, num_vram_tokens: int, now: float) -> tuple[int | None, bool]:
        """How many tokens beyond VRAM's hit a load can bring (None: ask again later), and whether
        the load is asynchronous."""
        turn = self.turns.get(request.request_id) or self.begin_turn(request, now)
        self.waits.adapters.left(turn)
        if self.waits.from_below.must_wait(turn, request, now):
            return None, False
        turn.epoch = self._epochs.of_hit(num_vram_tokens)
        if turn.state is State.WAITING:
            turn.vram_tokens = num_vram_tokens
        num_tokens = self.tier.find(request, num_vram_tokens)
        if not num_tokens:
            return 0, False
        if self.waits.same_load.must_wait(turn, request, num_vram_tokens):
            return None, False
        if self.waits.bus.hold_back(turn, self.groups.least_blocks(num_tokens), now):
            return None, False
        return num_tokens, True

    def after_alloc(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int, now: float
    ) -> None:
        """The request owns its blocks now: queue the load of what it lacks, hand its pin over."""
        self.steps.note_change()
        turn = self.turns.get(request.request_id) or self.begin_turn(request, now)
        self.waits.adapters.allocated(turn, request, loads=num_external > 0)
        turn.epoch = self._epochs.of_blocks(turn.epoch, request.request_id)
        found = self._nothing_below
        if num_external:
            found = self.tier.load(turn.program.key, request, block_ids, num_external, now)
        before = turn.state
        self.turns.move(turn, State.RUNNING)
        if before is not State.RUNNING:  # else it has loaded, and now computes
            in_stock = self._stock.admitted(request, turn.vram_tokens)
            if before is State.WAITING:
                turn.hit_tokens = {"vram": turn.vram_tokens, **found}
                turn.stock_tokens = in_stock
                self._begins(turn, request, now)
            else:
                self.records.happened("readmit", now, turn)
        self.retention.hand_over(turn, now)

    def _begins(self, turn: Turn, request: Any, now: float) -> None:
        """The turn runs for the first time."""
        num_found = turn.num_found
        self.waits.gate.found(turn, num_found)
        num_lost = 0 if turn.stock_tokens is None else turn.stock_tokens - num_found
        if self._heeds_stock and self._balance.lost(num_lost, now):
            self.steps.give_up_pins(now)
        self.records.admitted(request, turn, now)
        shared = turn.program.kept.shared(request.block_hashes) * self.groups.hash_size
        self._costs.waited(now - turn.arrival, turn.vram_tokens < shared, now)
        if self._lends and turn.program.num_active == 1 and not turn.identity.hints.compaction:
            self.tier.lend(turn.program.key, request, num_found)

    def _has_load(self) -> bool:
        """Whether a turn waits that would on stock vLLM, too: for a seat, or because those who wait
        would not fit if no pin held room."""
        room = self._pool.get_num_free_blocks() + self.retention.num_blocks
        return self.turns.has_load(self._max_running, room * self.groups.hash_size)

    def waits_for_store(self, now: float) -> bool:
        """A running turn lacks blocks: have vLLM wait for those that a store holds, rather than
        preempt another turn, if the store will end soon. All who run behind it are left out of the
        step meanwhile, so nobody new may take what comes free; in vLLM's own queues somebody
        would."""
        waits = bool(self.queues) and self.traffic.oldest_store_age(now) < MAX_STORE_WAIT_S
        if waits:
            self.waits.bus.close()
        return waits

    def make_room(
        self, request: Any, attempt: Callable[[], Any], need: int, others_run: bool, now: float
    ) -> Any:
        """An allocation failed: retry it while pins give way (Room.make)."""
        self.steps.note_change()
        if not need:  # of a running turn
            self._stock.look()
        turn = self.turns.get(request.request_id)
        return self.room.make(
            request.request_id, turn, attempt, need, others_run, now, request.priority
        )

    def note_preempted(self, request_id: str, now: float) -> None:
        """vLLM preempted a running turn."""
        turn = self.turns.get(request_id)
        if turn is not None:
            self.waits.adapters.left(turn)
            self.turns.move(turn, State.PREEMPTED)
            self._stock.preempted(request_id)
            self.tier.take_back(turn.program.key)
            self.records.happened("preempt", now, turn)

    # --- end of a turn ----------------------------------------------------------------
    def finish(
        self, request: Any, block_ids: Sequence[Sequence[int]], end: TurnEnd, now: float
    ) -> dict[str, Any] | None:
        """A turn is over: decide what to keep, hold it, and return what the client is told."""
        self.tier.forget_request(request.request_id)
        turn = self.turns.end(request.request_id)
        if turn is None:  # it came before we were switched off and on again
            return None
        while now in turn.program.left:  # what it leaves is known by its end: no two have the same
            now = math.nextafter(now, math.inf)
        self.waits.left(turn)
        self.steps.note_change()
        self._stock.finished(request)
        self._balance.look(now)
        self.room.references_dropped()
        self.retention.unexpect(turn)
        # Where turns run on with older KV, their blocks are looked at when vLLM frees them.
        is_mixed = self._epochs.found_older is not None
        if self._pop_blocks is None or end not in BY_ITSELF or is_mixed:
            return self._end(turn, request, self._tables(block_ids), end, now)
        # Its own references become ours, so that neither we nor vLLM touch and free each block.
        blocks = self._pop_blocks(request.request_id)
        hold = self._ended.adopt(blocks, ids_of(blocks))
        try:
            return self._end(turn, request, [hold.blocks], end, now)
        finally:
            self._ended.release(hold)

    def _tables(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[Any]]:
        """The blocks with these numbers. Where vLLM's rule finds what is kept, only whether there
        are any counts."""
        if self.groups.rule is not None:
            return block_ids
        return [list(map(self._pool.blocks.__getitem__, ids)) for ids in block_ids]

    def _end(
        self,
        turn: Turn,
        request: Any,
        tables: Sequence[Sequence[Any]],
        end: TurnEnd,
        now: float,
    ) -> dict[str, Any] | None:
        program = turn.program
        went_away = end is TurnEnd.ABORTED and self._reader.went_away(request)
        is_cut = went_away and request.num_output_tokens > 0 and turn.state is State.RUNNING
        if is_cut and self._interruptions.are_resumed(program):
            end = TurnEnd.LENGTH  # its client interrupts answers, as in speech, and goes on
        elif end is TurnEnd.ABORTED and not went_away:
            end = TurnEnd.STOP
        blocks = self._kept(turn, request, tables, end)
        # Others of its program may have ended since its arrival.
        text = PromptText(request.prompt_token_ids)
        turn.is_stray = strays(program, turn.identity, request.block_hashes, text)
        # By the same prompt again nobody is known, so a retry goes on with what came before it.
        is_known = end is not TurnEnd.ABORTED or (is_cut and turn.number == 1)
        self.programs.end_turn(
            program,
            turn.identity.hints,
            now,
            request if is_known else None,
            num_prompt_blocks=request.num_prompt_tokens // self.groups.hash_size,
            is_stray=turn.is_stray,
        )
        if not turn.is_stray and (blocks or end is not TurnEnd.ABORTED):
            self._note_kept(turn, request, blocks, now)
            if is_cut:
                self._interruptions.cut_off(program, now)
        # Before the first decision, or the average is one block and this turn counts as hundreds.
        self._costs.assume(footprint=len(blocks))
        if turn.diverged is not None and turn.diverged.is_habit:
            blocks = NO_BLOCKS
        choice = self._decisions.keep(turn, request, blocks, end, now)
        if turn.is_let_in:
            self.waits.gate.finished(turn, request.num_tokens, now)
        return answer(turn, choice) if self._echo else None

    def end_program(self, key: str, now: float) -> bool:
        """An operator says that the program is over; False if it is not known. What its turns left
        goes before all that others have, and those under way are its last. A pin that a turn came
        back for is that turn's."""
        program = self.programs.get(key)
        if program is None:
            return False
        self.turns.make_last(program)
        self.retention.end_program(key, now)
        self.tier.demote_all(key)
        program.end()
        absence = self._away.absence_of(key)
        if absence is not None:
            self.steps.fell_silent(absence, now)
        return True

    def _kept(
        self, turn: Turn, request: Any, tables: Sequence[Sequence[Any]], end: TurnEnd
    ) -> ChainBlocks:
        """The blocks of the turn that may be kept. None may, if some of them may be KV of other
        weights, or if a lookup by hash may find such blocks in their place."""
        has_rule = self.groups.rule is not None
        is_found_by_hash = has_rule and not self._epochs.is_vram_of_now
        also = self._shorter_hits(turn, request, end) if has_rule else ()
        # Called even if nothing may be kept, because it makes the rule forget the turn.
        blocks = self.groups.take_kept(tables, request, also, turn.taken)
        return NO_BLOCKS if turn.epoch < self._epochs.number or is_found_by_hash else blocks

    def _shorter_hits(self, turn: Turn, request: Any, end: TurnEnd) -> Iterator[int]:
        """Where a next turn may hit that does not go on from the end of this one, in tokens."""
        if end is TurnEnd.ABORTED or self._answers.are_altered(turn.program):
            yield self.groups.prompts_end(request)
        if turn.program.departs(turn.since, request.block_hashes):
            yield self.groups.departs_at(request, turn.num_found)

    def _note_kept(self, turn: Turn, request: Any, blocks: ChainBlocks, now: float) -> None:
        program, size = turn.program, self.groups.hash_size
        hit = max(0, blocks.end - self.groups.num_proof_tokens)
        num_common = turn.num_found // size if turn.num_common is None else turn.num_common
        kept = Kept.of(request, hit // size, size, num_common)
        program.leave(kept, turn.since, turn.diverged, now, turn.is_edit)
        end = self.groups.prompts_end(request)
        self._answers.finished(program, request.block_hashes, end)

    def switch(self, is_on: bool, now: float) -> None:
        """Begin to act, or stop. Stopping keeps only what was learned: no turn is known any more,
        and of the copies only the loads that requests wait for continue."""
        self.steps.note_change()
        if not is_on:
            self.steps.forget_all(PinEnd.SWITCHED_OFF, now)
            for turn in filter(None, map(self.turns.end, list(self.turns))):
                self.waits.left(turn)
                self.programs.end_turn(turn.program, turn.identity.hints, now)
            self._away.forget_gaps()  # we will not see the programs return
            self.room.nobody_waits(now)
            self._epochs.follow_older(None)  # while we are off, nobody sees new requests
        if self.groups.rule is not None:
            self.groups.rule.switch(is_on)
        self.records.switched(is_on, now)

    def update_gauges(self) -> None:
        """Set the gauges, which are levels, not events; called when metrics are collected."""
        account = self.records.account
        self.records.count_lost()
        account.gauge("programs", len(self.programs))
        self.waits.gate.update_gauges()
        self.snapshots.update_gauges(account)


# A preemption costs a prefill, while a store in flight ends within milliseconds. After this
# many seconds the store counts as slow, and the running turn is preempted after all.
MAX_STORE_WAIT_S = 0.25
# While nothing happens, we look for silent programs this often.
LOOK_S = 0.05


class Steps:
    """What the engine asks in each step. `epochs`: which KV is of the current weights."""

    def __init__(
        self,
        epochs: Epochs,
        retention: Retention,
        tier: Tier,
        decider: Decider,
        reader: ToolReader,
        records: Records,
        room: Room,
        waker: Any,
    ) -> None:
        self.epochs = epochs
        self._retention = retention
        self._pins = retention.pins
        self._tier, self._traffic = tier, tier.traffic
        self._decider, self._away, self._reader = decider, decider.away, reader
        self._records = records
        self._room = room
        self._waker = waker
        self._told_reason = ""
        self._owes_step = False  # metrics show a reset only after a step
        self._idle_until = -math.inf  # until then `plan` may be left out

    def note_change(self) -> None:
        """Make the next `plan` run: something has happened that it may have to take into account.
        Every hook after which a pin, a copy or a turn may be different calls it."""
        self._idle_until = -math.inf

    def plan(self, now: float) -> StepPlan:
        """One tick: expire what is due, then send everything queued to the workers."""
        self.expire(now)
        for absence in self._away.silent(now):
            self.fell_silent(absence, now)
        self._reader.new_step()
        self._room.new_step(now)
        self._owes_step = False
        plan = self._tier.plan(now)
        self._wake_for_tier(now)
        self._record_tier(now)
        if not len(self._traffic):
            self._idle_until = min(now + LOOK_S, self._pins.next_deadline())
        return plan

    def is_idle(self, now: float) -> bool:
        """Whether `plan` has nothing to do: nothing has happened since it last ran, no copy is
        under way, and nothing is due. This is so in most steps of a busy server."""
        return now < self._idle_until

    def settle(self, report: WorkerReport, now: float) -> None:
        """Take in which transfers the workers saw settle since their last report."""
        self.note_change()
        # If an epoch has begun since that change, by a reset for instance, it needs no other.
        is_over = 0 <= report.changed_in < self.epochs.number
        if report.new_weights and not is_over:
            self.new_epoch(Cause.WEIGHTS, now, report.new_weights)
        self._tier.hear(report)
        for transfer in self._traffic.settle(report, now):
            self._records.settled(transfer, now)
            self._decider.settled(transfer, now)
            self._room.references_dropped()
        self._wake_for_tier(now)  # for what is begun below now that a store has settled
        self._record_tier(now)

    def expire(self, now: float) -> None:
        """End the pins that are due. If a pin's blocks belong in DRAM at its end (After.STORE), a
        store is queued for those that are not there yet."""
        self._retention.expire(now, before=partial(self._store_at_end, now=now))

    def give_up_pins(self, now: float) -> None:
        """What pins keep finds less than stock vLLM would: end them."""
        self._retention.give_up_all(now, before=partial(self._store_at_end, now=now))

    def _store_at_end(self, pin: LivePin, now: float) -> None:
        if pin.then is After.STORE:
            self._tier.store(pin.program, pin.blocks.read_again(), now)

    def has_work(self, now: float) -> bool:
        """Whether an otherwise idle engine must step: if a copy must be looked at or a pin is due,
        and once after a reset, since vLLM sends metrics only with a step."""
        next_look = min(self._tier.next_look, self._pins.next_deadline())
        return next_look <= now or self._owes_step

    def fell_silent(self, absence: Absence, now: float) -> None:
        """The program is not expected back: count its gaps, and close its decision."""
        self._decider.silent(absence, now)
        self._records.silent(absence, now)

    def new_epoch(self, cause: Cause, now: float, why: str = "") -> None:
        """KV computed until now is outdated: end every pin, and forget every block below VRAM."""
        if cause is Cause.RESET and self.epochs.is_resetting:
            return
        self.note_change()
        self.epochs.begin(cause, now, why)
        self._owes_step = True

    def forget_all(self, cause: PinEnd, now: float) -> None:
        """End every pin with `cause`, and forget every block below VRAM."""
        self.note_change()
        self.epochs.forget_all(cause, now)
        self._owes_step = True

    def shutdown(self, now: float) -> None:
        """The server stops: end every pin, and close all parts that have threads. Idempotent."""
        self._retention.end_all(PinEnd.SHUTDOWN, now)
        self._waker.close()
        self._records.close(now)

    def _wake_for_tier(self, now: float) -> None:
        """Let an idle engine step when the tier wants it to. At once needs no waker."""
        at = self._tier.next_look
        self._waker.set(at if at > now else math.inf, "tier")

    def _record_tier(self, now: float) -> None:
        """Record once that a tier has failed: all memory below VRAM, or what is below DRAM."""
        if (reason := self._tier.down_reason) != self._told_reason:
            self._told_reason = reason
            what = "disk_down" if self._tier.is_up else "tier_down"
            self._records.happened(what, now, reason=reason)
