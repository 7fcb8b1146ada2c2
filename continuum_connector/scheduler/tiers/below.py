"""Below: what DRAM asks of a memory below it, and tells it. NothingBelow: where there is none.

Such a memory exchanges blocks with DRAM alone: what it keeps comes up into DRAM's slots, from where
a load brings it to VRAM as usual. It is made with the index of these slots, and sees what comes to
DRAM, is used and leaves. So a store never waits for it: what leaves DRAM for room is kept below by
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
    """`names`: of it, as metrics, trace and answers call it. `brings_up`: whether a turn may have
    to wait for blocks that come up. `look_every_s`: how often an idle engine must step for it.
    `down_reason`: why it no longer keeps anything, if it once did. `num_blocks`: that it can hold.
    """

    names: Sequence[str]
    brings_up: bool

    @property
    def look_every_s(self) -> float: ...
    @property
    def down_reason(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...

    # --- the slots of DRAM --------------------------------------------------------------
    def grow(self, num_slots: int) -> None:
        """DRAM has so many slots from now on."""

    def came(
        self, slots: Numbers, ends: Sequence[int], which: Numbers, uses: Iterable[int] | int
    ) -> None:
        """These slots are to hold `which` of a chain's blocks, that end at `ends`, in tokens;
        `uses`: how many turns had used each before it left for a loan and came back."""

    def used(self, slots: Numbers) -> None:
        """Another turn has stored on top of these."""

    def uses(self, slots: Numbers) -> Iterable[int]:
        """How many turns have used each of these, as `came` is told again."""

    def left(self, slots: Numbers, program: str) -> int:
        """These blocks of a program leave for room and may still be wanted. Returns how many are
        nowhere else."""

    def takes_all(self, now: float) -> bool:
        """Whether what comes to DRAM is kept below whatever it is worth, because that pays. Then
        tails of chains that are kept below leave DRAM first."""

    def are_kept(self, slots: Numbers) -> Flags:
        """Which of these last blocks of a chain are kept below, or would leave with one that is."""

    def stays(self, program: str, worth: float, tail: Numbers, num: int) -> bool:
        """Whether a tail of such blocks, which would free `num` slots, stays in DRAM even so: none
        of it is kept below, or it is needed sooner than it would come up."""

    # --- what DRAM has and does ----------------------------------------------------------
    def stored(self, program: str) -> None:
        """Some blocks of the program have come to DRAM."""

    def doubted(self, tickets: Tickets) -> None:
        """A load found these slots wrong: what was taken from them is as wrong."""

    def demote(self, program: str, keys: Sequence[Key | None] | None) -> None:
        """The program wants these no more; None: nothing that it has."""

    def dram_down(self) -> None:
        """DRAM keeps nothing any more, so nothing can come up."""

    # --- turns ---------------------------------------------------------------------------
    def expect(
        self,
        program: str,
        request: Any,
        num_vram_tokens: int,
        num_turns: int,
        now: float,
        before: Told | None = None,
    ) -> Told | None:
        """A turn has arrived, or is about to be admitted: begin to bring up what it will want, if
        that is worth it. `num_vram_tokens`: what VRAM seems to have of it. `num_turns`: turns under
        way, which a prefill delays. Returns what it has of the turn; `before`: what this said the
        last time, which counts still."""

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether the turn is to wait for blocks that come up; once it is not, never again."""

    def came_up(self, request_id: str, start: int, num_tokens: int) -> Mapping[str, int]:
        """Of the `num_tokens` that are loaded for the turn from `start` on, how many came up for it
        since it arrived, by name."""

    def forget(self, request_id: str) -> None:
        """The turn is over: it waits for nothing any more."""

    # --- steps ---------------------------------------------------------------------------
    def step(self, now: float) -> None:
        """Begin what no request asks for. Orders begun here leave in the same step."""

    def hear(self, report: WorkerReport) -> None:
        """Take in what the workers report about it; Traffic takes in its copies."""

    def reset(self, now: float) -> list[Transfer]:
        """Begin a new epoch: nothing kept until now comes up. Returns its transfers that
        are over."""

    def announce(self) -> None:
        """Tell vLLM's KV events what has left it."""

    def update_gauges(self) -> None:
        """Set the gauges of what is a level, not an event."""


class NothingBelow:
    """What leaves DRAM is gone."""

    names: Sequence[str] = ()
    brings_up = False
    look_every_s = math.inf
    down_reason = ""
    num_blocks = 0

    def __init__(self, index: Any = None) -> None:
        """Nothing is kept, so nothing is asked of DRAM's index."""

    def grow(self, num_slots: int) -> None: ...
    def came(
        self, slots: Numbers, ends: Sequence[int], which: Numbers, uses: Iterable[int] | int
    ) -> None: ...
    def used(self, slots: Numbers) -> None: ...
    def stored(self, program: str) -> None: ...
    def doubted(self, tickets: Tickets) -> None: ...
    def demote(self, program: str, keys: Sequence[Key | None] | None) -> None: ...
    def dram_down(self) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def step(self, now: float) -> None: ...
    def hear(self, report: WorkerReport) -> None: ...
    def announce(self) -> None: ...
    def update_gauges(self) -> None: ...

    def uses(self, slots: Numbers) -> Iterable[int]:
        return itertools.repeat(0)

    def left(self, slots: Numbers, program: str) -> int:
        return len(slots)

    def takes_all(self, now: float) -> bool:
        return False

    def are_kept(self, slots: Numbers) -> Flags:
        return np.zeros(len(slots), np.bool_)

    def stays(self, program: str, worth: float, tail: Numbers, num: int) -> bool:
        return True

    def expect(
        self,
        program: str,
        request: Any,
        num_vram_tokens: int,
        num_turns: int,
        now: float,
        before: Told | None = None,
    ) -> Told | None:
        return before

    def awaits(self, request_id: str, now: float) -> bool:
        return False

    def came_up(self, request_id: str, start: int, num_tokens: int) -> Mapping[str, int]:
        return {}

    def reset(self, now: float) -> list[Transfer]:
        return []
