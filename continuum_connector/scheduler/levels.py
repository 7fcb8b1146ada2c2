"""Levels: how things stand at this moment, for the policy and for the metrics."""

from __future__ import annotations

from collections.abc import Sized

from continuum_connector.account import Account
from continuum_connector.costs.costs import Costs
from continuum_connector.policy.base import Snapshot
from continuum_connector.scheduler.holds import BlockPool, HoldTable
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.tier import DramTier


class Levels:
    """Reads the levels of those who own them; changes nothing but gauges."""

    def __init__(
        self,
        pool: BlockPool,
        retention: Retention,
        store_holds: HoldTable,
        tier: DramTier,
        costs: Costs,
        turns: Sized,
        waiting: Sized,
    ) -> None:
        """`turns`: those that are there; `waiting`: of them, those that never ran."""
        self._pool = pool
        self._retention = retention
        self._store_holds = store_holds
        self._tier = tier
        self._costs = costs
        self._turns = turns
        self._waiting = waiting

    def snapshot(self, now: float) -> Snapshot:
        """The world as the policy sees it: what only a client's wish holds counts as free."""
        pinned = self._retention.holds.num_blocks
        wishes = min(self._retention.num_wish_blocks, pinned)  # shared blocks count for each
        return Snapshot(
            now=now,
            num_blocks=self._pool.num_gpu_blocks - 1,  # one is the null block
            num_free_blocks=self._pool.get_num_free_blocks() + wishes,
            num_pinned_blocks=pinned - wishes,
            num_waiting=len(self._waiting),
            num_running=len(self._turns) - len(self._waiting),
            has_tier=self._tier.is_up,
            queueing_s=self._costs.queueing_s(now),
            eta=self._costs.eta,
            mean_blocks=self._costs.mean_blocks,
            price=self._costs.price(now),
            residence_s=self._tier.residence_s(now),
            num_hinted_blocks=self._retention.num_hinted_blocks,
        )

    def update_ledger(self, account: Account) -> None:
        """Set what counters are balanced with; in every step, or a scrape between a counter's
        step and its gauge's finds the ledger open. About 2 us."""
        pinned = self._retention.holds.num_blocks
        account.gauge("pins_live", len(self._retention.pins))
        account.gauge("held_blocks", pinned + self._store_holds.num_blocks)
        self._tier.update_ledger()

    def update_gauges(self, account: Account) -> None:
        """Set what else is a level, not an event; called about once a second."""
        account.gauge("vram_blocks", self._pool.num_gpu_blocks - 1)  # one is the null block
        account.gauge("pinned_blocks", self._retention.holds.num_blocks)
        self._tier.update_gauges()
