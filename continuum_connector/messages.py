"""What crosses between the scheduler and the workers: block ids, and what became of them.

Workers never learn of requests' tokens, programs, tools or time (law 7). One `StepPlan`
goes down with each step, one `WorkerReport` comes up from each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StoreOrder:
    """Copy VRAM `blocks` to host `slots`, pairwise; both int32 of one length."""

    transfer_id: int
    blocks: BlockIds
    slots: BlockIds


@dataclass(frozen=True)
class LoadOrder:
    """Copy host `slots` to VRAM `blocks`, pairwise; `request_id` waits for it."""

    transfer_id: int
    request_id: str
    blocks: BlockIds
    slots: BlockIds


@dataclass(frozen=True)
class StepPlan:
    """Everything the workers shall do in one step, in this order: cancels, loads, stores.

    What is cancelled and ordered in one plan is not begun.
    """

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    cancels: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.loads or self.stores or self.cancels)


@dataclass
class TransferOutcome:
    """How many ranks finished one transfer, and how.

    `reasons` holds each failing rank's one-word cause ("driver", "refused", "cancelled",
    "closed", "no_tier", "corrupt"). `num_bytes` and `seconds` are summed over the ranks that are
    done.
    """

    num_done: int = 0
    num_failed: int = 0
    reasons: tuple[str, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def num_ranks(self) -> int:
        return self.num_done + self.num_failed

    def add(self, other: TransferOutcome) -> None:
        """Count `other` ranks' results of the same transfer in."""
        self.num_done += other.num_done
        self.num_failed += other.num_failed
        self.reasons += other.reasons
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds


@dataclass
class WorkerReport:
    """What one rank (after `merge`: several ranks) saw settle since its last report.

    `ready_slots`: per rank, how many host slots it can use, where that has changed.
    `tier_down` is the sentence that says why a rank has no DRAM tier, or "" if it has one.
    """

    outcomes: dict[int, TransferOutcome] = field(default_factory=dict)
    ready_slots: dict[int, int] = field(default_factory=dict)
    tier_down: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.outcomes or self.ready_slots or self.tier_down)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Sum both reports into this one and return it."""
        for transfer_id, outcome in other.outcomes.items():
            self.outcomes.setdefault(transfer_id, TransferOutcome()).add(outcome)
        for rank, num_slots in other.ready_slots.items():
            self.ready_slots[rank] = max(num_slots, self.ready_slots.get(rank, 0))
        self.tier_down = self.tier_down or other.tier_down
        return self
