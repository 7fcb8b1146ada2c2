"""Marks: what the disk needs to know about the blocks in DRAM, as columns beside the slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from continuum_connector.scheduler.kv_groups import Flags, Key, Numbers
from continuum_connector.scheduler.tiers.slots import Tickets, numbers_of

_MOST_USES = 2**30
NEVER = -1
MAX_LOST = 1024  # programs of which it is remembered why some of their blocks are on no disk


class Marks:
    """For each slot: its block's place in the chain, how many turns used it, if it is on disk."""

    def __init__(
        self, keys_at: Callable[[Numbers], list[Key]], slot_blocks: int = 1, block_tokens: int = 1
    ) -> None:
        """`keys_at`: what slots hold; `slot_blocks`: blocks of a disk slot."""
        self._keys_at = keys_at
        self._slot_blocks = slot_blocks
        self._block_tokens = block_tokens
        self.places = np.zeros(0, np.int32)
        self.uses = np.zeros(0, np.int32)  # by turns that stored it, or stored on top of it
        self.is_saved = np.zeros(0, np.bool_)
        self.is_refused = np.zeros(0, np.bool_)  # its write was refused and counted
        # The index's version when another write displaced it from the disk, or NEVER.
        self.displaced_at = np.full(0, NEVER, np.int64)
        # Names of the disk slots that were written from each slot, if a disk slot takes several
        # blocks.
        self._names: npt.NDArray[np.object_] = np.zeros(0, object)
        self._lost: dict[str, tuple[Key, str]] = {}  # by program, the latest last
        self.num_unsaved = 0  # blocks that left for room before they could be written, ever

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        more = num_slots - len(self.places)
        for name in ("places", "uses", "is_saved", "is_refused", "_names"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self.displaced_at = np.concatenate([self.displaced_at, np.full(more, NEVER)])

    def came(
        self, numbers: Numbers, ends: Sequence[int], which: Numbers, uses: Iterable[int] | int
    ) -> None:
        """These slots are to hold blocks of a chain (Below)."""
        self.places[numbers] = np.asarray(ends, np.int32)[which] // self._block_tokens - 1
        known = uses if isinstance(uses, int) else np.fromiter(uses, np.int32, len(numbers))
        self.uses[numbers] = known + 1
        self.is_saved[numbers] = False
        self.is_refused[numbers] = False
        self.displaced_at[numbers] = NEVER
        self._names[numbers] = 0

    def used(self, numbers: Numbers) -> None:
        """Another turn has stored on top of these slots."""
        self.uses[numbers] = np.minimum(self.uses[numbers] + 1, _MOST_USES)

    def save(self, tickets: Tickets) -> None:
        """These slots' blocks are on disk."""
        self.is_saved[numbers_of(tickets)] = True

    def name(self, tickets: Tickets, names: Sequence[Key]) -> None:
        """Disk slots of those names were written from these slots, each from equally many."""
        parts = numbers_of(tickets).reshape(len(names), -1).tolist()
        for name, part in zip(names, parts, strict=True):
            for number in part:
                others = self._names[number] or ()
                if name not in others:
                    self._names[number] = (*others, name)

    def names_of(self, tickets: Tickets) -> set[Key]:
        """The names of all disk slots that were written from these slots."""
        return set(itertools.chain.from_iterable(filter(None, self._names[numbers_of(tickets)])))

    def are_saved(self, numbers: Numbers) -> Flags:
        """Which of a chain's blocks are on disk. Blocks of its tail after the last whole disk slot
        count as saved, because no disk takes them."""
        are_saved = self.is_saved[numbers]
        if self._slot_blocks > 1 and len(numbers):
            places = self.places[numbers]
            are_saved |= places >= (places[-1] + 1) // self._slot_blocks * self._slot_blocks
        return are_saved

    def left(self, numbers: Numbers, program: str) -> int:
        """These blocks of a program leave for room and may still be wanted. Returns how many no
        disk has."""
        lost = numbers[~self.is_saved[numbers]]
        if not len(lost):
            return 0
        self.num_unsaved += int(np.count_nonzero(~self.is_refused[lost]))
        first = int(lost[self.places[lost].argmin()])
        self._lost.pop(program, None)
        why = "budget" if self.is_refused[first] else "unsaved"
        self._lost[program] = self._keys_at(np.array([first]))[0], why
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return len(lost)

    def lost(self, program: str) -> tuple[Key, str]:
        """Of the program's blocks that left last before a disk had them, the first in its chain,
        and why: they were "unsaved", or the "budget" did not allow it. Two empty ones if none is
        remembered."""
        return self._lost.get(program, (b"", ""))

    def clear(self) -> None:
        """What is nowhere after a reset was not lost for room."""
        self._lost.clear()
