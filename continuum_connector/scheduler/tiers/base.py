"""Tier: what the scheduler side asks of the memory below VRAM, however many kinds of it there are.

Callers speak of tokens and of vLLM's blocks, never of slots or keys. A second tier lies behind the
first: its blocks reach VRAM through the first one's slots. So callers see one Tier, and only
make.py knows how many there are. All of them share one Traffic: one ledger of copies, one set of
deadlines, one plan for the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.tiers.below import Below
from continuum_connector.scheduler.tiers.below import Told as Told
from continuum_connector.scheduler.tiers.eviction import Rank
from continuum_connector.scheduler.tiers.loans import Loans
from continuum_connector.scheduler.tiers.traffic import Traffic
from continuum_connector.scheduler.tiers.transfers import Transfer

RankAt = Callable[[float], Rank]  # now -> worth of chains, valid until something happens


class Tier(Protocol):
    """What finished turns left below VRAM. Any failure in it ends as a miss (law 4).

    `names`: the memories it consists of, nearest first, as metrics, trace and answers call them.
    `traffic`: its copies, with those of everything else below VRAM.
    `is_up`: whether it takes and gives anything; if it once did and no longer does, `down_reason`
    says why in a sentence.
    `loans`: lends what it has of running turns' prompts to them.
    `below`: the memory below the nearest one: it brings blocks nearer while turns wait.
    """

    names: Sequence[str]
    traffic: Traffic
    loans: Loans
    below: Below

    @property
    def is_up(self) -> bool: ...
    @property
    def down_reason(self) -> str: ...
    @property
    def next_look(self) -> float:
        """From when on an otherwise idle engine must step, for copies in flight or what else a
        memory does without being asked."""

    @property
    def num_blocks(self) -> int:
        """How many blocks it can hold once all of it exists; 0 when it is down."""

    def store(
        self,
        program: str,
        blocks: ChainBlocks,
        now: float,
        request: Any = None,
    ) -> bool:
        """Queue a store of those `blocks` that are not there yet. Room is made by evicting what is
        worth no more; blocks that get no room are not stored.

        Returns whether most of them are here now or will be. Their VRAM blocks are held until the
        copy has settled, so the caller may release its own hold at once. `request`: the one they
        belong to. This supersedes the program's chains that they continue, and no other chain.
        """

    def find(self, request: Any, num_vram_tokens: int) -> int:
        """Return how many tokens beyond `num_vram_tokens` a load could bring back."""

    def load(
        self,
        program: str,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        now: float,
    ) -> Mapping[str, int]:
        """Queue the load that `find` promised into the blocks that vLLM allocated for it. Returns
        how many of the tokens each of `names` had.

        `block_ids`: the request's blocks per group, null (0) outside windows.
        `num_tokens`: how many to load, from where VRAM's hit ended.
        """

    def forget_request(self, request_id: str) -> None:
        """The request is over: drop what was remembered for its lookups."""

    def demote(self, program: str, blocks: ChainBlocks, request: Any) -> None:
        """Make what the program has here of this turn's blocks, and of what they continue, the
        first to be evicted, until it is used again."""

    def demote_all(self, program: str) -> None:
        """Make all that the program has here the first to be evicted, until it is used again."""

    def residence_s(self, now: float) -> float:
        """Seconds a stored block stays before it leaves for room; infinite while none has to."""

    def plan(self, now: float) -> StepPlan:
        """Return this step's orders for the workers, with those that no request asks for."""

    def hear(self, report: WorkerReport) -> None:
        """Take in what the workers report about the memory itself; Traffic takes in the copies."""

    def reset(self, now: float) -> list[Transfer]:
        """Begin a new epoch, as after a weight update: forget every block, however many there are.
        Stores in flight are abandoned: their VRAM blocks are free at once, and what they write is
        thrown away.

        Returns the transfers that this ended: those that had not left yet, and no loads.
        """

    def take_events(self) -> list[Any]:
        """Return vLLM KV events for the blocks that came or left since the last call."""

    def update_gauges(self) -> None:
        """Set the gauges of what is a level, not an event; called about once a second."""
