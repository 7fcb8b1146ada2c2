"""Samples: programs that begin with the same prompt, which each of them will need again.

A trainer samples a prompt several times. Clients say so (`group`, `group_size`), or we see that the
samples' first prompts are the same. Below VRAM the group has a chain of its own for the prompt, of
the same slots that the samples' chains use. So the prompt is there once, and stays until the last
sample is over, in whatever order they end. In VRAM a pin of the group's own holds the prompt, if
the policy finds it worth its room; this is decided anew whenever a sample's turn ends. In a batch,
all samples stand in line where the first of them stands.
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


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one prompt.

    `size`: how many there will be, 0 if the client did not say. `prompt`: the hash of the prompt's
    last full block; `num_tokens`: the tokens up to its end. `live`: programs that are not over.
    `is_stored`: whether the tier has ever taken the prompt.
    """

    key: str
    arrival: float
    size: int
    prompt: bytes
    num_tokens: int
    num_begun: int = 0
    last_seen: float = 0.0
    is_stored: bool = False
    live: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether all samples have begun, as far as we know."""
        return self.num_begun >= self.size

    @property
    def is_shared(self) -> bool:
        return max(self.num_begun, self.size) > 1

    @property
    def is_over(self) -> bool:
        return not self.live and self.is_whole

    def num_others(self, program: str) -> int:
        """How many other samples may need the prompt: those under way, and those still to come."""
        num_live = len(self.live) - (program in self.live)
        return num_live + max(0, self.size - self.num_begun)


@dataclass(frozen=True)
class SharedPrompt:
    """A group's prompt, whose `blocks` the last turn of `program` has left. `num_others` other
    samples may need them."""

    group: Group
    program: str
    blocks: ChainBlocks
    num_others: int


class Samples:
    """Groups by key, and programs that have a group: at most `most` of either. The group that no
    program has joined for longest is forgotten first, and so is the program silent for longest.

    `keeps`: whether the policy says what is worth a place in DRAM; if not, nothing is kept for a
    group. `of_batch`: samples stand together in line. Without a batch, a client that repeats the
    prompt of others, or names their group, would thereby pass all turns that came meanwhile.
    Microseconds per call.
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
        self._keeps = keeps and groups.are_simple  # with other groups these blocks alone are no hit
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._of_program: OrderedDict[str, Group] = OrderedDict()
        self._num_shared = 0  # groups of more than one sample
        self._num_sharing = 0  # programs of those groups that are not over

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, program: str) -> Group | None:
        return self._of_program.get(program)

    def begin(self, turn: Turn, request: Any, now: float) -> None:
        """A turn has arrived; a program's first turn shows which group it belongs to, if any."""
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
            return  # the group has all the samples that it was to have
        self._join(group, program, now)
        turn.group = key
        if group.is_shared:
            turn.sample = Sample(key, group.num_begun, group.size, group.num_tokens)

    def finished(
        self, turn: Turn, request: Any, blocks: ChainBlocks, now: float
    ) -> SharedPrompt | None:
        """A turn has ended with those `blocks`. Store the prompt's blocks for the group, if they
        are not there: a store may have failed, and blocks may have left. Returns the prompt if
        other samples may need it."""
        program = turn.program.key
        group = self._of_program.get(program)
        if group is None or not self._keeps or blocks.end < group.num_tokens:
            return None
        num_others = group.num_others(program)
        number = group.num_tokens // self._kv_groups.hash_size
        # The program may have left the prompt, as after a compaction.
        if not num_others or request.block_hashes[number - 1] != group.prompt:
            return None
        prompt = blocks.only(range(bisect_right(blocks.ends, group.num_tokens)))
        if self._tier.store(group.key, prompt, now, request, supersedes=False):
            group.is_stored = True
        return SharedPrompt(group, program, prompt, num_others)

    def ended(self, program: Program, now: float) -> None:
        """The program is over; with its group's last program, the group's prompt is let go."""
        self._leave(program.key, now)

    def resident(self, key: str, queueing_s: float, now: float) -> Resident | None:
        """The group as it is ranked when room is made in DRAM; None if no group has that key any
        more. The next sample to come needs the prompt, so the group counts as waiting."""
        group = self._groups.get(key)
        if group is None or self._is_silent(group, now):
            return None
        return Resident(key, group.arrival, now, is_waiting=True, queueing_s=queueing_s)

    def clear(self) -> None:
        """Forget all groups, because no turn is known any more."""
        self._groups.clear()
        self._of_program.clear()
        self._num_shared = self._num_sharing = 0

    def update_gauges(self, account: Account) -> None:
        """Set the gauges, which are levels, not events; called about once a second."""
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
        if len(self._of_program) > self._most:  # many programs may send one prompt, and never end
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
        if group.is_stored:
            self._tier.demote(group.key)
        self._retention.end_of(group.key, PinEnd.PROGRAM_DONE, now)

    def _count(self, group: Group, sign: int) -> None:
        """Add the group as it is to the sums, or subtract it before it changes (`sign` -1)."""
        if group.num_begun and group.is_shared:
            self._num_shared += sign
            self._num_sharing += sign * len(group.live)

    def _is_silent(self, group: Group, now: float) -> bool:
        return now - group.last_seen > OVER_S
