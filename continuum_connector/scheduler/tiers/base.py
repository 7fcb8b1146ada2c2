"""Tier: what the scheduler side asks of the memory below VRAM, however many kinds of it there are.
Below: what DRAM asks of a memory below it, and tells it. NothingBelow: where there is none.
TierEvents: what vLLM's KV events tell of all of them.

Callers speak of tokens and of vLLM's blocks, never of slots or keys. A second tier lies behind the
first: it exchanges blocks with DRAM alone, and what it keeps comes up into DRAM's slots, from where
a load brings it to VRAM as usual. So callers see one Tier, and only build.py knows how many there
are. All of them share one Traffic: one ledger of copies, one set of deadlines, one plan for the
workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import Told
from continuum_connector.scheduler.kv_groups import ChainBlocks, Flags, Key, KvGroups, Numbers
from continuum_connector.scheduler.tiers.slots import Rank, Tickets
from continuum_connector.scheduler.tiers.traffic import Traffic, Transfer

RankAt = Callable[[float], Rank]  # now -> worth of chains, valid until something happens


class Tier(Protocol):
    """What finished turns left below VRAM. Any failure in it ends as a miss (law 4).

    `names`: the memories it consists of, nearest first, as metrics, trace and answers call them.
    `traffic`: its copies, with those of everything else below VRAM.
    `is_up`: whether it takes and gives anything; if it once did and no longer does, `down_reason`
    says why in a sentence.
    `below`: the memory below the nearest one: it brings blocks nearer while turns wait.
    """

    names: Sequence[str]
    traffic: Traffic
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
        is_prompt_own: bool = True,
    ) -> bool:
        """Queue a store of those `blocks` that are not there yet. Room is made by evicting what is
        worth no more; blocks that get no room are not stored.

        Returns whether most of them are here now or will be. Their VRAM blocks are held until the
        copy has settled, so the caller may release its own hold at once. `request`: the one they
        belong to. `is_prompt_own`: whether only what continues them has the end of its prompt. This
        supersedes the program's chains that they continue, and no other chain.
        """

    def find(self, request: Any, num_vram_tokens: int) -> int:
        """Return how many tokens beyond `num_vram_tokens` a load could bring back."""

    def is_coming(self, block_hash: bytes) -> bool:
        """Whether a load under way begins with that block."""

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

    def lend(self, program: str, request: Any, num_tokens: int) -> None:
        """The program's only turn under way runs, and has the first `num_tokens` of its prompt in
        VRAM, or is about to load them. Lend it the newest of the program's chains that are about
        that.

        VRAM has those blocks while the turn runs, and at its end the turn stores all of them anew.
        So until then they leave before all that is live, and their slots hold what is nowhere else.
        """

    def take_back(self, program: str) -> None:
        """That turn does not run any more, or is not alone: nothing more leaves for it."""

    def end_loan(self, program: str, request_id: str) -> int:
        """That turn has ended. Return how many of its first blocks were lent to it, if some of them
        left, so that a turn that is not stored can put them back; else 0."""

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

    def reset(self) -> list[Transfer]:
        """Begin a new epoch, as after a weight update: forget every block, however many there are.
        Stores in flight are abandoned: their VRAM blocks are free at once, and what they write is
        thrown away.

        Returns the transfers that this ended: those that had not left yet, and no loads.
        """

    def take_events(self) -> list[Any]:
        """Return vLLM KV events for the blocks that came or left since the last call."""

    def update_gauges(self) -> None:
        """Set the gauges of what is a level, not an event; called about once a second."""


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
        `takes_all` says so: none of it is kept below, or not for long, or it is needed sooner than
        it would come up.
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

    def reset(self) -> list[Transfer]:
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


class TierEvents:
    """vLLM KV events (BlockStored, BlockRemoved, medium "CPU") for DRAM blocks, collected between
    two calls of vLLM's `take_events`.

    Routers learn from them which replica has a program's KV. An event is published only once the
    block is really there: after its store has settled.
    """

    def __init__(self, factory: Any, groups: KvGroups) -> None:
        """`factory`: builds vLLM's event objects (compat.KvEventFactory)."""
        self._factory = factory
        self._groups = groups
        self._pending: dict[int, list[tuple[Key, Any]]] = {}
        self._visible: set[Key] = set()  # announced as stored and not yet as removed
        self._out: list[Any] = []

    def describe(
        self, transfer_id: int, request: Any, keys: Sequence[Key], ends: Sequence[int]
    ) -> None:
        """Prepare the events of a store, or of a read from below, while its request still has its
        tokens; `ends`: where in the chain each block ends."""
        spans = [
            (self._groups.start_of(key, end), end) for key, end in zip(keys, ends, strict=True)
        ]
        events = self._factory.stored(request, spans, keys, self._groups.hash_size)
        self._pending[transfer_id] = list(zip(keys, events, strict=True))

    def stored(self, transfer_id: int, kept: Container[Key]) -> None:
        """The store settled; `kept`: those of its blocks that can be found now."""
        for key, event in self._pending.pop(transfer_id, ()):
            if key in kept:
                self._visible.add(key)
                self._out.append(event)

    def lost(self) -> None:
        """All of DRAM was forgotten, and nothing else."""
        self.removed(list(self._visible))

    def removed(self, keys: Iterable[Key]) -> None:
        """These left DRAM, or their store failed; only those announced before are withdrawn."""
        for key in keys:
            if key in self._visible:
                self._visible.discard(key)
                self._out.append(self._factory.removed(key))

    def kept_below(self, keys: Sequence[Key]) -> None:
        """These are kept below DRAM. Blocks that were written with them, under the same name, are
        not announced: once only the name is left, nothing tells which blocks those were."""
        self._out += self._factory.kept_below(keys, self._groups.hash_size)

    def left_below(self, keys: Sequence[Key]) -> None:
        """These are kept there no more."""
        self._out += self._factory.left_below(keys)

    def take(self) -> list[Any]:
        """Return the events since the last take, in the order in which things happened."""
        out, self._out = self._out, []
        return out
