"""Marks: what is known of the blocks in DRAM for the disk's sake, as columns beside the slots.

Kept only where there is a disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.slots import Numbers, Tickets, numbers_of

Flags = npt.NDArray[np.bool_]
_MOST_USES = 2**30


class Marks:
    """Of every slot: its block's place in its chain, how many turns used it, is it on disk?"""

    def __init__(self, num_slots: int, slot_blocks: int = 1) -> None:
        """`slot_blocks`: of a disk slot."""
        self._slot_blocks = slot_blocks
        self.places = np.zeros(num_slots, np.int32)
        self.uses = np.zeros(num_slots, np.int32)  # by turns that stored it, or on top of it
        self.is_saved = np.zeros(num_slots, np.bool_)
        self.is_refused = np.zeros(num_slots, np.bool_)  # to be written, and counted as such
        # Names of the disk slots that were written from there, where one takes several blocks.
        self._names: npt.NDArray[np.object_] = np.zeros(num_slots, object)
        # Whether what comes may take the place of what is on disk, where it is going as well,
        # though it is worth less.
        self.passes_on: Callable[[float], bool] = lambda now: False
        # Whether so many blocks of a program that are on disk stay even so, though worth so much.
        self.stays: Callable[[str, float, int], bool] = lambda program, worth, num: True
        self.num_unsaved = 0  # blocks that left for room before their turn to be written, ever

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        more = num_slots - len(self.places)
        for name in ("places", "uses", "is_saved", "is_refused", "_names"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def came(self, numbers: Numbers, places: npt.NDArray[np.int32]) -> None:
        """They are to hold blocks of those places in their chain."""
        self.places[numbers] = places
        self.uses[numbers] = 1
        self.is_saved[numbers] = False
        self.is_refused[numbers] = False
        self._names[numbers] = 0

    def used(self, numbers: Numbers) -> None:
        """Another turn has stored on top of them."""
        self.uses[numbers] = np.minimum(self.uses[numbers] + 1, _MOST_USES)

    def save(self, tickets: Tickets) -> None:
        """They are on disk."""
        self.is_saved[numbers_of(tickets)] = True

    def name(self, tickets: Tickets, names: Sequence[Key]) -> None:
        """Disk slots of those names were written from them, each from as many."""
        parts = numbers_of(tickets).reshape(len(names), -1).tolist()
        for name, part in zip(names, parts, strict=True):
            for number in part:
                others = self._names[number] or ()
                if name not in others:
                    self._names[number] = (*others, name)

    def names_of(self, tickets: Tickets) -> set[Key]:
        """Of all disk slots that were written from them."""
        return set(itertools.chain.from_iterable(filter(None, self._names[numbers_of(tickets)])))

    def are_saved(self, numbers: Numbers) -> Flags:
        """Which of a chain's blocks are on disk. As good as there is what its tail has behind the
        last disk slot, which no disk takes."""
        are_saved = self.is_saved[numbers]
        if self._slot_blocks > 1 and len(numbers):
            places = self.places[numbers]
            are_saved |= places >= (places[-1] + 1) // self._slot_blocks * self._slot_blocks
        return are_saved

    def left(self, numbers: Numbers) -> int:
        """They left for room, and somebody may want them. Returns how many no disk has."""
        is_lost = ~self.is_saved[numbers]
        self.num_unsaved += int(np.count_nonzero(is_lost & ~self.is_refused[numbers]))
        return int(np.count_nonzero(is_lost))
