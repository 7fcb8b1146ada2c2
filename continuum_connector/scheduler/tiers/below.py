"""Below: what DRAM asks of a memory below it, and tells it. NothingBelow: where there is none.

Such a memory exchanges blocks with DRAM alone: what it keeps comes up into DRAM's slots, from where
a load brings it to VRAM as usual. It is made with the index of these slots, and sees what comes to
DRAM, is used and leaves. A store never waits for it: what leaves DRAM for room is kept below by
then, or nowhere. Whatever fails below ends as a miss, and a memory that is down leaves DRAM as it
is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from continuum_connector.messages import WorkerReport
from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.slots import Flags, Numbers, Tickets
from continuum_connector.scheduler.tiers.transfers import Transfer


class Told(Protocol):
    """What a memory below had for a turn, for the trace and the answer: of `num_tokens` that were
    neither in VRAM nor in DRAM. It may change until the turn is admitted."""

    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """By the name of the memory."""


class Below(Protocol):
    """The memory below DRAM, as DRAM and waiting turns see it. The defaults are those of none.

    `names`: what metrics, trace and answers call it. `brings_up`: whether a turn may have to wait
    for blocks that come up. `look_every_s`: how often an idle engine must step for it.
    `down_reason`: why it no longer keeps anything, if it once did.
    """

    names: Sequence[str] = ()
    brings_up: bool = False
    look_every_s: float = math.inf
    down_reason: str = ""

    @property
    def num_blocks(self) -> int:
        """How many blocks it can hold."""
        return 0

    # --- the slots of DRAM --------------------------------------------------------------
    def grow(self, num_slots: int) -> None:
        """DRAM has so many slots from now on."""
        return

    def came(
        self, slots: Numbers, ends: Sequence[int], which: Numbers, uses: Iterable[int] | int
    ) -> None:
        """These slots are to hold `which` of a chain's blocks, that end at `ends`, in tokens;
        `uses`: how many turns had used each before it left for a loan and came back."""
        return

    def used(self, slots: Numbers) -> None:
        """Another turn has stored on top of these."""
        return

    def uses(self, slots: Numbers) -> Iterable[int]:
        """How many turns have used each of these, as `came` is told again."""
        return itertools.repeat(0)

    def left(self, slots: Numbers, program: str) -> int:
        """These blocks of a program leave for room and may still be wanted. Returns how many are
        nowhere else."""
        return len(slots)

    def takes_all(self, now: float) -> bool:
        """Whether what comes to DRAM is kept below whatever it is worth, because that pays. Then
        tails of chains that are kept below leave DRAM first."""
        return False

    def are_kept(self, slots: Numbers) -> Flags:
        """Which of these last blocks of a chain are kept below, or would leave with one that is."""
        return np.zeros(len(slots), np.bool_)

    def stays(self, program: str, worth: float, tail: Numbers, num: int) -> bool:
        """Whether this `tail` of a chain, which would free `num` slots, stays in DRAM although
        `takes_all` says so: none of it is kept below, or it is needed sooner than it would come up.
        """
        return True

    # --- what DRAM has and does ----------------------------------------------------------
    def stored(self, program: str) -> None:
        """Some blocks of the program have come to DRAM."""
        return

    def doubted(self, tickets: Tickets) -> None:
        """A load found these slots wrong: what was taken from them is as wrong."""
        return

    def demote(self, program: str, keys: Sequence[Key | None]) -> None:
        """The program wants these no more."""
        return

    def demote_all(self, program: str) -> None:
        """The program wants nothing any more that it has here."""
        return

    def dram_down(self) -> None:
        """DRAM keeps nothing any more, so nothing can come up."""
        return

    # --- turns ---------------------------------------------------------------------------
    def bring_up(
        self,
        program: str,
        request: Any,
        num_vram_tokens: int,
        num_turns: int,
        now: float,
        before: Told | None = None,
    ) -> Told | None:
        """A turn has arrived, or is about to be admitted: begin to bring up what it needs, if that
        is worth it and not under way yet. `num_vram_tokens`: how much of its prompt VRAM seems to
        have. `num_turns`: turns under way, which a prefill would delay. Returns what this memory
        has for the turn, at least what it had at the last call (`before`)."""
        return before

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether the turn must wait for blocks that come up. Once False, it stays False."""
        return False

    def came_up(self, request_id: str, start: int, num_tokens: int) -> Mapping[str, int]:
        """Of the `num_tokens` that are loaded for the turn from `start` on, how many came up for it
        since it arrived, by name."""
        return {}

    def forget(self, request_id: str) -> None:
        """The turn is over, or its client went away: it waits for nothing any more."""
        return

    # --- steps ---------------------------------------------------------------------------
    def step(self, now: float) -> None:
        """Begin what no request asks for. Orders begun here leave in the same step."""
        return

    def hear(self, report: WorkerReport) -> None:
        """Take in what the workers report about it; Traffic takes in its copies."""
        return

    def reset(self, now: float) -> list[Transfer]:
        """Begin a new epoch: nothing kept until now comes up. Returns its transfers that this
        ended."""
        return []

    def announce(self) -> None:
        """Tell vLLM's KV events what has left it."""
        return

    def update_gauges(self) -> None:
        """Set the gauges of what is a level, not an event."""
        return


class NothingBelow(Below):
    """What leaves DRAM is gone."""

    def __init__(self, index: Any = None) -> None:
        """Nothing is kept, so nothing is asked of DRAM's index."""
