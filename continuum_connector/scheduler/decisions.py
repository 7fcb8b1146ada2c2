"""Decider: tells the policy what is known of a finished turn, and learns from what follows.
Decisions: does what it decides.

Decider asks the policy, and teaches Gaps and Costs what turns and transfers show. What steps and
waits show, others tell Costs themselves. DramWorth: what a program's blocks in DRAM are worth, as
the policy sees it.

The policy sees a snapshot: the state of VRAM, DRAM and the queue at this moment. Snapshots takes
it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from continuum_connector.costs import Costs
from continuum_connector.forecast import Gaps
from continuum_connector.observe.account import Account
from continuum_connector.policy.base import (
    NO_FORECAST,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Resident,
    Snapshot,
    stores,
)
from continuum_connector.policy.hinted import Hinted, without_end, without_pin
from continuum_connector.programs.program import IdentitySource, Program, ProgramTable
from continuum_connector.scheduler.holds import BlockPool, num_usable
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.pins import Retention
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.stock import Balance
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.tiers.traffic import Kind, Transfer, TransferState
from continuum_connector.scheduler.turns import Absence, Away, LivePin, PinEnd, Turn, TurnEnd, Turns
from continuum_connector.scheduler.waits import Bus
from continuum_connector.toolcalls import CUT, UNREAD, Asked, Ending, ToolReader, asked_of

DONE = Asked(Ending.ANSWER)  # what a last turn asks for: nothing
MAY_ASK_AGAIN = "the client went away, and may ask again: pinned as what it went on from"


class Decider:
    """Asks the policy. `now` is monotonic seconds."""

    def __init__(
        self,
        policy: Hinted,
        gaps: Gaps,
        away: Away,
        costs: Costs,
        reader: ToolReader,
    ) -> None:
        self.policy = policy
        self.gaps = gaps
        self.away = away
        self.costs = costs
        self._reader = reader

    # --- what happened ----------------------------------------------------------------
    def arrived(self, turn: Turn, now: float) -> float | None:
        """A turn arrived; return how long its program was away, or None if it was not away."""
        if self.policy.reads and not turn.identity.hints.tools:
            self._reader.start()
        if turn.is_stray:
            return None
        program, since = turn.program, turn.since
        if since is not None and turn.may_begin_alike:
            self.away.hold_gap(program.key, since, now)
            since = None
        if (before := program.edited_by(since)) is not None:
            self.away.learn_held(program.key, before)
        return self.away.arrived(program.key, since, now)

    def settled(self, transfer: Transfer, now: float) -> None:
        """A transfer is over: if its bytes arrived, learn how long such a copy takes.

        A store counts as the time of the copy plus one short step, because a load is seen at the
        end of such a step. The store's own report may come with a step that computed a prompt too.
        """
        costs, seconds, outcome = self.costs, now - transfer.admitted, transfer.outcome
        num_blocks = transfer.num_ahead + len(transfer)
        if transfer.state is not TransferState.DONE:
            if transfer.kind is Kind.READ and transfer.cancelled:
                costs.read(num_blocks, seconds, is_done=False)
        elif transfer.kind is Kind.STORE:
            if outcome is not None and outcome.seconds:
                shortest_s, _ = costs.step_s
                seconds = min(seconds, outcome.seconds / outcome.num_ranks + shortest_s)
            costs.stored(num_blocks, seconds)
        elif transfer.kind is Kind.READ:
            costs.read(num_blocks, seconds)
        elif transfer.kind is Kind.LOAD and outcome is not None:
            costs.loaded(num_blocks, seconds, outcome.seconds / outcome.num_ranks)

    def silent(self, absence: Absence, now: float) -> None:
        """A program has been away for so long that it counts as over, unless a stray turn of it is
        under way."""
        if absence.gaps and not absence.program.num_active:
            self._over(absence.program, absence.num_turns, now)

    # --- the decision -----------------------------------------------------------------
    def decide(
        self, turn: Turn, request: Any, blocks: ChainBlocks, end: TurnEnd, snapshot: Snapshot
    ) -> tuple[FinishedTurn, Choice]:
        """Return what is known of a finished turn, and what the policy decides for it."""
        hints, num_blocks = turn.identity.hints, len(blocks)
        asked = self._asked(turn, request, end)
        tool_gaps, all_gaps = self.gaps.recorded(asked)
        finished = FinishedTurn(
            program=turn.program.key,
            turn=turn.number,
            num_tokens=request.num_tokens,
            num_blocks=num_blocks,
            hints=hints,
            aborted=end is TurnEnd.ABORTED,
            asked=asked,
            gap=self.gaps.forecast(asked),
            tool_gaps=tool_gaps,
            all_gaps=all_gaps,
            prefill_s=self.costs.prefill_s(blocks.end),  # tokens after it are computed anyway
            load_s=self.costs.load_s(num_blocks) if snapshot.has_tier else math.inf,
            bus_s=self.costs.bus_s(num_blocks),
            is_prior=self.costs.has_prior_prefill,
            diverged=turn.diverged,
        )
        choice = self.choose(finished, snapshot)
        if end is not TurnEnd.ABORTED:
            self._finished(turn, asked, num_blocks, snapshot.now)
        return finished, choice

    def choose(self, finished: FinishedTurn, snapshot: Snapshot) -> Choice:
        """Return what the policy decides. Also called again, when the snapshot has changed."""
        return self.policy.decide(finished, snapshot)

    def worth_now(self, pin: LivePin, now: float) -> float:
        """Return what a pin is worth now, given that its program has not returned yet: 0 for a
        question, so that no turn waits for the room of one, and where nothing of its program is
        awaited: it is forgotten, or has gone on from elsewhere."""
        is_awaited = pin.is_returning or self.away.absence_of(pin.program) is not None
        if not is_awaited or self.away.is_question(pin.program, pin.started):
            return min(pin.rank[0], 0.0)
        gap = self.away.forecast_since(pin.program, pin.started)
        if gap is None or not 0.0 < pin.rank[0] < math.inf:
            return pin.rank[0]
        return self.policy.aged(pin.value, gap, now - pin.started)

    # --- parts ------------------------------------------------------------------------
    def _asked(self, turn: Turn, request: Any, end: TurnEnd) -> Asked:
        """What the turn asks for: as the client declared it, or else as its text says."""
        hints = turn.identity.hints
        if hints.final:
            return DONE

        def read() -> Asked:
            if end is TurnEnd.ABORTED or not self.policy.reads:
                return UNREAD
            is_cut = end is TurnEnd.LENGTH
            asked = self._reader.read(request.output_token_ids, truncated=is_cut)
            if not asked.in_blocks or self._runs_blocks(turn.program, request):
                return asked
            return CUT if is_cut else DONE  # an example for a person

        asked = asked_of(hints.tools, read)
        # If the client declares that more will come, another turn follows, even if the text looks
        # like a last answer.
        is_over = asked.ending in (Ending.ANSWER, Ending.LAST)
        return UNREAD if is_over and hints.final is False else asked

    def _runs_blocks(self, program: Program, request: Any) -> bool:
        """Whether somebody runs the shell blocks that the program is answered, as its first prompt
        that is answered by one says. Later prompts have that answer in them."""
        if program.runs_blocks is None:
            program.answers_blocks(self._reader.asks_for_blocks(request.prompt_token_ids))
        return bool(program.runs_blocks)

    def _finished(self, turn: Turn, asked: Asked, num_blocks: int, now: float) -> None:
        program = turn.program
        is_habit = turn.diverged is not None and turn.diverged.is_habit  # of which nothing is kept
        if turn.is_admitted and not is_habit:  # else it may never have held a block
            self.costs.footprint(num_blocks)
        if turn.is_stray:
            return
        is_last = asked.ending is Ending.LAST  # of its own chain: others may still be continued
        if turn.identity.hints.final or (is_last and self.away.forecast_of(program.key) is None):
            self._over(program, program.num_turns, now)
        elif not is_last:
            self.away.left(program, asked, now)

    def _over(self, program: Program, num_turns: int, now: float) -> None:
        if not program.num_active:  # else other conversations of its id go on
            self.away.ended(program.key, now, were_edits=not program.begin_alike)
            program.rest()
        num_new = program.counts(num_turns)
        # A single request without a name that no turn followed is a question, not a program.
        # Counting such chats would hide how many turns the agents' programs have.
        if num_turns > 1 or program.source is not IdentitySource.NONE:
            self.costs.program_over(num_new)


class DramWorth:
    """Ranks chains: a few dozen whenever room is made in DRAM, once per turn that ends.

    A chain is away from the end of the turn that left it until a turn continues it, and its
    forecast is that of this turn's tools. What other turns of its program do meanwhile says nothing
    of it.
    """

    def __init__(self, programs: ProgramTable, decider: Decider, turns: Turns) -> None:
        self._programs = programs
        self._policy = decider.policy
        self._away = decider.away
        self._costs = decider.costs
        self._turns = turns

    def rank_at(self, now: float) -> Callable[[str, float], float]:
        """Return what gives the worth of a program's chain: those of the lowest leave first."""
        queueing_s, worth = self._costs.queueing_s(now), self._policy.dram_rank

        def rank(key: str, last_used: float) -> float:
            program = self._programs.get(key)
            if program is None:
                # Forgotten: only its blocks show that it was there. Its client may still come back.
                return worth(Resident(key, last_used, last_used, finished=last_used), now)
            since = program.left_at(last_used)
            gap = None if since is None else self._away.forecast_since(key, since)
            last_used = last_used if since is None else since
            # As far as anybody can tell. What the program no longer knows, although it knows what
            # others of its turns left, goes by its own last use, whatever else the program does.
            is_known = since is not None or not program.left
            is_in_use = gap is None and is_known and program.num_active > 0
            resident = Resident(
                program=key,
                arrival=program.arrival,
                last_used=program.last_seen if is_in_use else last_used,
                finished=None if is_in_use else last_used,
                gap=gap or NO_FORECAST,
                is_waiting=is_in_use and self._turns.has_waiting(key),
                # Program order serves the oldest first: with no turn ahead, it does not queue.
                queueing_s=queueing_s * self._turns.share_ahead(program.arrival),
            )
            return worth(resident, now)

        return rank


class Decisions:
    """Decides, stores, pins and records, once per finished turn."""

    def __init__(
        self,
        decider: Decider,
        snapshots: Snapshots,
        retention: Retention,
        tier: Tier,
        records: Records,
        has_prefixes: bool,
    ) -> None:
        """`has_prefixes`: a part of a chain is found without the rest, as with one group of full
        attention; of windows and states a turn that is over has only its end's."""
        self._decider = decider
        self._snapshots = snapshots
        self._retention = retention
        self._tier = tier
        self._records = records
        self._has_prefixes = has_prefixes

    def keep(
        self, turn: Turn, request: Any, blocks: ChainBlocks, end: TurnEnd, now: float
    ) -> Choice:
        """Do what the policy decides for the turn's hashed `blocks`, and return the decision.

        The store comes first. It fails if DRAM holds only blocks that are needed sooner. Then we
        ask the policy again: blocks not worth a pin beside a copy may be worth one without it.
        """
        snapshot = self._snapshots.take(now)
        finished, choice = self._decider.decide(turn, request, blocks, end, snapshot)
        taken = turn.came_for if finished.aborted and turn.taken and blocks else None
        if taken is not None and isinstance(choice.decision, Free) and not snapshot.pins_lose:
            choice = replace(choice, decision=_again(taken), reason=MAY_ASK_AGAIN)
        choice = without_end(choice) if turn.is_stray else self._fitting(choice, finished)
        key = turn.program.key
        if stores(choice.decision) and not self._store(turn, request, blocks, now):
            snapshot = replace(snapshot, takes_store=False)
            choice = self._fitting(self._decider.choose(finished, snapshot), finished)
        num_lent = self._tier.end_loan(key, request.request_id)
        if num_lent and not (stores(choice.decision) or finished.is_last):
            # Some of the chain lent to this turn has left DRAM, because the turn was to store it
            # anew. But its client went away, and may ask again, or it is not worth a store of its
            # own: put back what was lent.
            lent = blocks.only(range(min(num_lent, len(blocks))))
            self._store(turn, request, lent, now)
        self._records.decided(turn, finished, snapshot, choice, now)
        if isinstance(choice.decision, Pin):  # which supersedes what the turn continues, too
            self._retention.begin(choice.decision, turn.program, request, blocks, now)
        elif isinstance(choice.decision, Offload):
            self._retention.supersede(request, turn.program, PinEnd.SUPERSEDED, now)
        if finished.is_last and not turn.is_stray:
            self._retention.supersede(request, turn.program, PinEnd.PROGRAM_DONE, now)
            self._tier.demote(key, blocks, request)
        # After that, or what is stored here would leave before all that is live.
        if turn.number == 1 and isinstance(choice.decision, Free) and self._has_prefixes:
            self._keep_shared(turn, request, blocks, now)
        return choice

    def _keep_shared(self, turn: Turn, request: Any, blocks: ChainBlocks, now: float) -> None:
        """Store what the program's first turn, of which nothing else is kept, found and then
        departed from: two prompts begin with it, so others may. A prompt of which all was found is
        one that was sent twice. Of a later turn, what it found may be its program's own."""
        num_found = bisect_right(blocks.ends, turn.num_found)
        if 0 < num_found < bisect_right(blocks.ends, request.num_prompt_tokens - 1):
            self._store(turn, request, blocks.only(range(num_found)), now)

    def _store(self, turn: Turn, request: Any, blocks: ChainBlocks, now: float) -> bool:
        # What a stray turn left, its program does not know (SchedulerSide._end).
        is_own = not turn.is_stray and turn.program.kept.is_prompt_own
        return self._tier.store(turn.program.key, blocks, now, request, is_own)

    def _fitting(self, choice: Choice, finished: FinishedTurn) -> Choice:
        if isinstance(choice.decision, Pin) and finished.num_blocks > self._retention.budget:
            # Such a pin would push out every other pin before it gave way itself.
            return without_pin(choice, "larger than max_pinned_fraction of VRAM")
        return choice


def _again(taken: LivePin) -> Pin:
    """The pin of a turn whose client went away: as long, and worth as much, as the one that it took
    over, as far as the policy wanted that."""
    own_s = min(taken.asked_from, taken.deadline) - taken.started
    return Pin(max(0.0, own_s), value=taken.rank[0])


class Snapshots:
    """Reads the levels from the objects that own them; changes nothing but gauges."""

    def __init__(
        self,
        pool: BlockPool,
        retention: Retention,
        tier: Tier,
        costs: Costs,
        turns: Turns,
        bus: Bus,
        balance: Balance,
    ) -> None:
        self._pool = pool
        self._retention = retention
        self._tier, self._traffic = tier, tier.traffic
        self._costs = costs
        self._turns = turns
        self._bus = bus
        self._balance = balance

    def take(self, now: float) -> Snapshot:
        """Take one for the policy, which sees blocks held only by clients' wishes as free."""
        pinned = self._retention.num_blocks
        wishes = min(self._retention.num_wish_blocks, pinned)  # counts a shared block once per pin
        return Snapshot(
            now=now,
            num_blocks=num_usable(self._pool),
            num_free_blocks=self._pool.get_num_free_blocks() + wishes,
            num_pinned_blocks=pinned - wishes,
            num_waiting=self._turns.num_waiting,
            num_running=len(self._turns) - self._turns.num_waiting,
            has_tier=self._tier.is_up,
            queueing_s=self._costs.queueing_s(now),
            eta=self._costs.eta,
            mean_blocks=self._costs.mean_blocks,
            price=self._costs.price(now),
            residence_s=self._tier.residence_s(now),
            num_hinted_blocks=self._retention.num_hinted_blocks,
            num_at_bus=self._bus.num_turns(now),
            pins_lose=self._balance.pins_lose(now),
        )

    def update_gauges(self, account: Account) -> None:
        """Set the gauges, which are levels, not events. They are sent in one payload with the
        counters that they must balance, or a scrape in between would find the ledger open."""
        pinned = self._retention.num_blocks
        account.gauge("pins_live", len(self._retention.pins))
        account.gauge("held_blocks", pinned + self._traffic.num_held)
        account.gauge("vram_blocks", num_usable(self._pool))
        account.gauge("pinned_blocks", pinned)
        self._traffic.update_gauges()
        self._tier.update_gauges()
