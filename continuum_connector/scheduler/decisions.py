"""Decisions: ask the policy what to do with a finished turn, then do it.

The policy sees a snapshot: the state of VRAM, DRAM and the queue at this moment. Snapshots takes
it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from msgspec.structs import replace

from continuum_connector.costs import Costs
from continuum_connector.observe.account import Account
from continuum_connector.policy.base import (
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    stores,
)
from continuum_connector.policy.hinted import without_end, without_pin
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.holds import BlockPool, num_usable
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.pins import Retention
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import PinEnd, Turn, TurnEnd, Turns
from continuum_connector.scheduler.waits import Bus


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
    ) -> None:
        self._pool = pool
        self._retention = retention
        self._tier, self._traffic = tier, tier.traffic
        self._costs = costs
        self._turns = turns
        self._bus = bus

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
        )

    def levels(self) -> dict[str, int]:
        """The levels that may be other in each step, for the trace."""
        return {
            "free_blocks": self._pool.get_num_free_blocks(),
            "pinned_blocks": self._retention.num_blocks,
            "waiting": self._turns.num_waiting,
            **self._traffic.blocks_under_way(),
        }

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
