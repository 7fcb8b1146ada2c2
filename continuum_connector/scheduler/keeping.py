"""Keeping: what becomes of a finished turn's blocks is asked of the policy, and done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from continuum_connector.policy.base import Choice, Decision, FinishedTurn, Free, Offload, stores
from continuum_connector.policy.base import Pin as PinDecision
from continuum_connector.policy.hinted import without_end, without_pin
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.levels import Levels
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.tier import DramTier
from continuum_connector.scheduler.turn import Turn, TurnEnd


class Keeping:
    """Decides, stores, pins and records, once per finished turn."""

    def __init__(
        self,
        decider: Decider,
        levels: Levels,
        retention: Retention,
        tier: DramTier,
        records: Records,
    ) -> None:
        self._decider = decider
        self._levels = levels
        self._retention = retention
        self._tier = tier
        self._records = records

    def keep(
        self, turn: Turn, request: Any, blocks: ChainBlocks, end: TurnEnd, now: float
    ) -> Choice:
        """Do what the policy decides for the turn's hashed `blocks`, and return it.

        The store comes first: DRAM may hold nothing but what is needed sooner. Then the policy
        is asked again, for it may be worth a pin what was not worth one beside its copy.
        """
        world = self._levels.snapshot(now)
        finished, choice = self._decider.decide(turn, request, len(blocks), end, world)
        choice = without_end(choice) if turn.is_stray else self._fitting(choice, finished)
        if stores(choice.decision) and not self._store(choice.decision, turn, request, blocks, now):
            world = replace(world, takes_store=False)
            choice = self._fitting(self._decider.policy.decide(finished, world), finished)
        self._records.decided(turn, finished, world, choice, now)
        self._hold(choice.decision, turn, request, blocks, now)
        return choice

    def _fitting(self, choice: Choice, finished: FinishedTurn) -> Choice:
        if isinstance(choice.decision, PinDecision) and (
            finished.num_blocks > self._retention.budget
        ):
            # It would push every other pin out before it gave way itself.
            return without_pin(choice, "larger than max_pinned_fraction of VRAM")
        return choice

    def _store(
        self, decision: Decision, turn: Turn, request: Any, blocks: ChainBlocks, now: float
    ) -> bool:
        key = turn.program.key
        taken = self._tier.store(key, blocks, now, request, supersedes=not turn.program.active)
        if not isinstance(decision, Free) and decision.is_wish:
            self._tier.index.demote(key)  # it takes only room that nobody else needs
        return taken

    def _hold(
        self, decision: Decision, turn: Turn, request: Any, blocks: ChainBlocks, now: float
    ) -> None:
        key = turn.program.key
        if isinstance(decision, PinDecision):
            self._retention.begin(decision, turn.program, request.block_hashes, blocks, now)
        if isinstance(decision, Offload):
            self._retention.end_of(key, PinEnd.SUPERSEDED, now)
        if turn.identity.hints.final and not turn.is_stray:
            self._retention.end_of(key, PinEnd.PROGRAM_DONE, now)
            self._tier.index.demote(key)
