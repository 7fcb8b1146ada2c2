"""Wanted: what a turn wants from the disk; Prompt: where each block of it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from continuum_connector.scheduler.kv_groups import Key, block_key
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Numbers


class CopyCosts(Protocol):
    """Seconds, as the scheduler side has measured them."""

    def read_s(self, num_blocks: int) -> float: ...
    def load_s(self, num_blocks: int) -> float: ...
    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float: ...
    @property
    def knows_prefill(self) -> bool: ...


class Wanted(NamedTuple):
    """Keys of a prompt's blocks, names of its disk slots. VRAM has the first `start` blocks."""

    program: str
    request: Any
    keys: list[Key]
    names: list[Key]
    start: int


@dataclass(frozen=True)
class Prompt:
    """Where what is wanted lies: each block's slot in DRAM, each disk slot's number, -1 where there
    is none. `is_there`: whether the block is in DRAM or VRAM."""

    wanted: Wanted
    in_dram: Numbers
    is_there: npt.NDArray[np.bool_]
    on_disk: Numbers

    @classmethod
    def look(cls, wanted: Wanted, dram: HostIndex, on_disk: Numbers) -> Prompt:
        """Look up what DRAM has now. `on_disk`: the number of each disk slot, -1 if it is not
        there."""
        in_dram = dram.slots_of(wanted.keys)
        is_there = in_dram >= 0
        is_there[: wanted.start] = True
        return cls(wanted, in_dram, is_there, on_disk)

    def missing(self, length: int) -> Numbers:
        """The depths of the disk slots that a hit needs beside what is there, up to the first that
        is not on disk. A depth is a place in the chain, counted in disk slots of `length` blocks.
        """
        is_whole = np.asarray(self.is_there.reshape(-1, length).all(axis=1))
        ends = (~is_whole & (self.on_disk < 0)).nonzero()[0]
        end = int(ends[0]) if len(ends) else len(is_whole)
        depths: Numbers = (~is_whole[:end]).nonzero()[0]
        return depths

    def nowhere(self, length: int) -> set[Key]:
        """The blocks that must be computed: neither in VRAM or DRAM nor on disk."""
        are_gone = ~self.is_there & np.repeat(self.on_disk < 0, length)
        return {self.wanted.keys[place] for place in are_gone.nonzero()[0].tolist()}

    def gained(self, depths: Numbers, length: int) -> tuple[int, int]:
        """How many blocks need not be computed once all that is missing is there, and how many
        blocks before them are there already."""
        if not len(depths):
            return len(self.wanted.keys) - self.wanted.start, self.wanted.start
        first, end = int(depths[0]) * length, (int(depths[-1]) + 1) * length
        first += int((~self.is_there[first:end]).argmax())
        return end - first, first

    def copied(self, depths: Numbers, length: int) -> tuple[int, int]:
        """How many blocks are read from these disk slots, and about how many are loaded then."""
        num_read = np.count_nonzero(~self.is_there.reshape(-1, length)[depths])
        return int(num_read), int(depths[-1] + 1 - depths[0]) * length


def block_keys(hashes: Sequence[bytes]) -> list[Key]:
    """Keys of a model's blocks of full attention."""
    suffix = block_key(b"", 0)
    return [block_hash + suffix for block_hash in hashes]
