"""Decisions: ask the policy what to do with a finished turn, then do it.

The policy sees a snapshot: the state of VRAM, DRAM and the queue at this moment.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from continuum_connector.costs.costs import Costs
from continuum_connector.observe.account import Account
from continuum_connector.policy.base import (
    After,
    Choice,
    Decision,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    stores,
)
from continuum_connector.policy.hinted import NO_HINTS, without_end, without_pin
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.samples import SharedPrompt
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turn, TurnEnd, Turns
from continuum_connector.scheduler.waiting import Bus
from continuum_connector.toolcalls.asked import UNREAD


class Decisions:
    """Decides, stores, pins and records, once per finished turn."""

    def __init__(
        self,
        decider: Decider,
        snapshots: Snapshots,
        retention: Retention,
        tier: Tier,
        records: Records,
    ) -> None:
        self._decider = decider
        self._snapshots = snapshots
        self._retention = retention
        self._tier = tier
        self._records = records

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
        if stores(choice.decision) and not self._store(choice.decision, turn, request, blocks, now):
            snapshot = replace(snapshot, takes_store=False)
            choice = self._fitting(self._decider.choose(finished, snapshot), finished)
        num_lent = self._tier.loans.take_back(turn.program.key, request.request_id)
        if num_lent and not (stores(choice.decision) or turn.identity.hints.final):
            self._put_back(turn, request, blocks.only(range(min(num_lent, len(blocks)))), now)
        self._records.decided(turn, finished, snapshot, choice, now)
        self._hold(choice.decision, turn, request, blocks, now)
        return choice

    def _fitting(self, choice: Choice, finished: FinishedTurn) -> Choice:
        if isinstance(choice.decision, Pin) and finished.num_blocks > self._retention.budget:
            # Such a pin would push out every other pin before it gave way itself.
            return without_pin(choice, "larger than max_pinned_fraction of VRAM")
        return choice

    def _store(
        self, decision: Decision, turn: Turn, request: Any, blocks: ChainBlocks, now: float
    ) -> bool:
        key = turn.program.key
        taken = self._tier.store(key, blocks, now, request, supersedes=not turn.program.num_active)
        if not isinstance(decision, Free) and decision.is_wish:
            self._tier.demote(key)  # a wish takes only room that no other chain needs
        return taken

    def _put_back(self, turn: Turn, request: Any, blocks: ChainBlocks, now: float) -> None:
        """Some of what the turn before left has gone, as this one was to store it anew; but its
        client went away, and may ask again, or it is not worth a store of its own."""
        self._tier.store(turn.program.key, blocks, now, request, supersedes=False)

    def _hold(
        self, decision: Decision, turn: Turn, request: Any, blocks: ChainBlocks, now: float
    ) -> None:
        key = turn.program.key
        if isinstance(decision, Pin):
            self._retention.begin(decision, turn.program, request.block_hashes, blocks, now)
        if isinstance(decision, Offload):
            self._retention.end_of(key, PinEnd.SUPERSEDED, now)
        if turn.identity.hints.final and not turn.is_stray:
            self._retention.end_of(key, PinEnd.PROGRAM_DONE, now)
            self._tier.demote(key)


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
            num_blocks=self._pool.num_gpu_blocks - 1,  # one is the null block
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

    def update_gauges(self, account: Account) -> None:
        """Set the gauges, which are levels, not events. They are sent in one payload with the
        counters that they must balance, or a scrape in between would find the ledger open."""
        pinned = self._retention.num_blocks
        account.gauge("pins_live", len(self._retention.pins))
        account.gauge("held_blocks", pinned + self._traffic.num_held)
        account.gauge("vram_blocks", self._pool.num_gpu_blocks - 1)  # one is the null block
        account.gauge("pinned_blocks", pinned)
        self._traffic.update_gauges()
        self._tier.update_gauges()


class SharedPrompts:
    """Keeps prompts that samples share in VRAM, by a pin of their group's own, in spare room.

    A sample's turn holds the prompt while it runs, and so does the sample's pin while it lasts.
    Between these, and for samples that have not come yet, nothing else would hold it: vLLM's prefix
    cache keeps it only until a request needs the blocks. So whenever a sample's turn ends, we ask
    whether to hold the prompt for the others. Below VRAM the group has a chain of its own
    (samples.py). We decide anew once half of the last pin's time is over.
    """

    def __init__(
        self, decider: Decider, snapshots: Snapshots, retention: Retention, records: Records
    ) -> None:
        self._decider = decider
        self._away, self._gaps, self._costs = decider.away, decider.gaps, decider.costs
        self._snapshots = snapshots
        self._retention, self._pins = retention, retention.pins
        self._records = records

    def keep(self, prompt: SharedPrompt, request: Any, now: float) -> None:
        """Hold the prompt for the group's other samples, if the policy finds it worth its room and
        no turn has waited for blocks recently (`price` is 0). This pin gives way before all that
        the policy has priced."""
        key, num_blocks = prompt.group.key, len(prompt.blocks)
        old = self._pins.get(key)
        if old is not None and now - old.started < (old.deadline - old.started) / 2:
            return
        snapshot = self._snapshots.take(now)
        pin = self._decider.choose(self._as_turn(prompt, snapshot), snapshot).decision
        has_room = snapshot.price == 0.0 and num_blocks <= self._retention.budget
        if not (isinstance(pin, Pin) and has_room):
            self._retention.end_of(key, PinEnd.SUPERSEDED, now)
            return
        self._records.happened(
            "prompt",
            now,
            program=key,
            ttl_s=pin.ttl_s,
            blocks=num_blocks,
            others=prompt.num_others,
        )
        # DROP: below VRAM the prompt has a chain already, or found no room. Any other pin is worth
        # more: valued by all samples that share it, this pin would outlive their own pins, and they
        # would compute everything but the prompt again.
        pin = replace(pin, then=After.DROP, value=0.0)
        self._retention.begin(pin, prompt.group, request.block_hashes, prompt.blocks, now)

    def _as_turn(self, prompt: SharedPrompt, snapshot: Snapshot) -> FinishedTurn:
        """The prompt as a finished turn: it is needed when the first of the other samples is back.
        Nobody knows when samples that have not come yet will come, so they count like those that
        are away."""
        gap = self._away.forecast_of(prompt.program) or self._gaps.forecast(UNREAD)
        num_blocks, num_tokens = len(prompt.blocks), prompt.blocks.end
        return FinishedTurn(
            program=prompt.group.key,
            turn=prompt.group.num_begun,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            hints=NO_HINTS,
            gap=gap.first_of(prompt.num_others),
            prefill_s=self._costs.prefill_s(num_tokens),
            load_s=self._costs.load_s(num_blocks) if snapshot.has_tier else math.inf,
            bus_s=self._costs.bus_s(num_blocks),
        )
