"""Samples: the programs that begin with one prompt, which each of them will want again.

A trainer samples a prompt several times. Clients say so (`group`, `group_size`), or the first
prompts of the samples are the same. Below VRAM the prompt is a chain of the group's own beside
theirs, of the same slots, so that it is there once and stays until the last of them is over,
whoever ends first. In VRAM it is held by a pin of the group's own, if the policy finds that worth
its room, which each turn of a sample that ends decides anew. In a batch they stand in line where
the first of them stands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from continuum_connector.observe.account import Account
from continuum_connector.policy.base import Resident
from continuum_connector.programs.program import GROUP, OVER_S, Program
from continuum_connector.scheduler.kv_groups import ChainBlocks, KvGroups
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Sample, Turn

_UNKNOWN = -1


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one prompt. `size`: how many there will be, 0 if nobody said; `prompt`: the
    hash of its last full block, `num_tokens` up to there; `live`: programs that are not over;
    `kept`: the epoch in which the prompt was stored."""

    key: str
    arrival: float
    size: int
    prompt: bytes
    num_tokens: int
    num_begun: int = 0
    last_seen: float = 0.0
    kept: int = _UNKNOWN
    live: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether all samples have begun, as far as is known."""
        return self.num_begun >= self.size

    @property
    def is_shared(self) -> bool:
        return max(self.num_begun, self.size) > 1

    @property
    def is_over(self) -> bool:
        return not self.live and self.is_whole

    def num_others(self, program: str) -> int:
        """How many beside that sample may want the prompt: those under way, and those to come."""
        return len(self.live - {program}) + max(0, self.size - self.num_begun)


@dataclass(frozen=True)
class Prompt:
    """A group's prompt, of which the last turn of `program` has left the `blocks`; `num_others`
    samples beside it may want them."""

    group: Group
    program: str
    blocks: ChainBlocks
    num_others: int


class Samples:
    """Groups by key, and programs with a group: `most` of either at most. The group that nobody
    joined for longest is forgotten first, and the program that has been silent for longest.

    `keeps`: whether the policy says what is worth a place in DRAM; else nothing is kept for a
    group. `of_batch`: they stand together in line; elsewhere who sends what others send, or names
    their group, would come before all who came meanwhile. Microseconds per call.
    """

    def __init__(
        self,
        tier: Tier,
        retention: Retention,
        groups: KvGroups,
        most: int,
        keeps: bool,
        of_batch: bool,
    ) -> None:
        self._tier = tier
        self._retention = retention
        self._kv_groups = groups
        self._most = most
        self._of_batch = of_batch
        self._keeps = keeps and groups.are_simple  # elsewhere a prompt's end alone is no hit
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._of_program: OrderedDict[str, Group] = OrderedDict()
        self._num_shared = 0  # groups of more than one
        self._num_sharing = 0  # programs of those that are not over

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, program: str) -> Group | None:
        return self._of_program.get(program)

    def begin(self, turn: Turn, request: Any, now: float) -> None:
        """A turn has arrived; a program's first says which group it is of, if it is of one."""
        program, hints = turn.program, turn.identity.hints
        known = self._of_program.get(program.key)
        if known is not None:
            known.last_seen = now
            turn.group = known.key
            self._of_program.move_to_end(program.key)
            return
        num_blocks = request.num_prompt_tokens // self._kv_groups.hash_size
        if turn.number > 1 or not num_blocks:
            return
        prompt = request.block_hashes[num_blocks - 1]
        key = hints.group or f"{GROUP}{prompt.hex()}"
        group = self._groups.get(key)
        if group is None or group.prompt != prompt or group.is_over or self._is_silent(group, now):
            self._over(group, now)
            num_tokens = num_blocks * self._kv_groups.hash_size
            group = Group(key, program.arrival, hints.group_size or 0, prompt, num_tokens)
        elif group.size and group.is_whole:
            return  # one more than it was to have
        self._join(group, program, now)
        turn.group = key
        if group.is_shared:
            turn.sample = Sample(key, group.num_begun, group.size, group.num_tokens)

    def finished(
        self, turn: Turn, request: Any, blocks: ChainBlocks, epoch: int, now: float
    ) -> Prompt | None:
        """A turn has ended with those `blocks`, which are KV of that epoch: the prompt's are stored
        for the group, unless they were. Returns that prompt, if others may want it."""
        program = turn.program.key
        group = self._of_program.get(program)
        if group is None or not self._keeps or blocks.end < group.num_tokens:
            return None
        num_others = group.num_others(program)
        number = group.num_tokens // self._kv_groups.hash_size
        if not num_others or request.block_hashes[number - 1] != group.prompt:  # it has left it
            return None
        prompt = blocks.only(range(bisect_right(blocks.ends, group.num_tokens)))
        if group.kept != epoch and self._tier.store(
            group.key, prompt, now, request, supersedes=False
        ):
            group.kept = epoch
        return Prompt(group, program, prompt, num_others)

    def ended(self, program: Program, now: float) -> None:
        """The program is over; with a group's last one its prompt is nobody's any more."""
        self._leave(program.key, now)

    def resident(self, key: str, queueing_s: float, now: float) -> Resident | None:
        """The group as who makes room in DRAM sees it; None if there is none of that key any more.
        The sample that comes first needs the prompt, so it is as if one of them waited."""
        group = self._groups.get(key)
        if group is None or self._is_silent(group, now):
            return None
        return Resident(key, group.arrival, now, is_waiting=True, queueing_s=queueing_s)

    def clear(self) -> None:
        """No turn is known any more."""
        self._groups.clear()
        self._of_program.clear()
        self._num_shared = self._num_sharing = 0

    def update_gauges(self, account: Account) -> None:
        """Set what is a level, not an event; called about once a second."""
        account.gauge("sample_groups", self._num_shared)
        account.gauge("samples", self._num_sharing)

    # --- parts ------------------------------------------------------------------------
    def _join(self, group: Group, program: Program, now: float) -> None:
        self._groups[group.key] = group
        self._groups.move_to_end(group.key)
        self._of_program[program.key] = group
        self._count(group, -1)
        group.live.add(program.key)
        group.num_begun += 1
        group.last_seen = now
        self._count(group, 1)
        if self._of_batch:
            program.arrival = min(program.arrival, group.arrival)
        if len(self._groups) > self._most:
            self._over(next(iter(self._groups.values())), now)
        if len(self._of_program) > self._most:  # many send one prompt, and are never over
            self._leave(next(iter(self._of_program)), now)

    def _leave(self, program: str, now: float) -> None:
        group = self._of_program.pop(program, None)
        if group is not None:
            self._count(group, -1)
            group.live.discard(program)
            self._count(group, 1)
            if group.is_over:
                self._over(group, now)

    def _over(self, group: Group | None, now: float) -> None:
        if group is None:
            return
        del self._groups[group.key]
        self._count(group, -1)
        for program in group.live:
            del self._of_program[program]
        if group.kept != _UNKNOWN:
            self._tier.demote(group.key)
        self._retention.end_of(group.key, PinEnd.PROGRAM_DONE, now)

    def _count(self, group: Group, sign: int) -> None:
        """The group as it stands goes into the sums, or out of them before it changes."""
        if group.num_begun and group.is_shared:
            self._num_shared += sign
            self._num_sharing += sign * len(group.live)

    def _is_silent(self, group: Group, now: float) -> bool:
        return now - group.last_seen > OVER_S
