"""Rivals: the ways in which Python code copies blocks without an engine of its own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from continuum_connector.messages import BlockIds
from continuum_connector.worker.engine import Direction

Copy = Callable[[], None]
Addresses = npt.NDArray[np.uint64]


class Rivals(Protocol):
    """`num_blocks` blocks of `block_bytes` in VRAM and as many slots in page-locked memory.

    A copy returns when it is done. The ids are in the order of the transfer.
    """

    def one(self, direction: Direction) -> None:
        """All bytes by one call: what the engine's bytes would take without blocks."""
        ...

    def each(
        self, direction: Direction, blocks: BlockIds, slots: BlockIds, patience_s: float
    ) -> int:
        """A call for each block, for at most `patience_s`; bytes copied."""
        ...

    def indexed(self, direction: Direction, blocks: BlockIds, slots: BlockIds) -> Copy | None:
        """torch's copies by index, ready to run; None without torch."""
        ...


class CpuRivals:
    """Ordinary memory at both ends: memmove, and torch of the CPU."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        shape = (num_blocks, block_bytes)
        self._vram = np.ones(shape, dtype=np.uint8)  # ones: every page is touched
        self._slots = np.ones(shape, dtype=np.uint8)

    def one(self, direction: Direction) -> None:
        src, dst = self._ends(direction)
        ctypes.memmove(dst.ctypes.data, src.ctypes.data, src.nbytes)

    def each(
        self, direction: Direction, blocks: BlockIds, slots: BlockIds, patience_s: float
    ) -> int:
        deadline = time.perf_counter() + patience_s
        ends = _addresses(self._vram, blocks), _addresses(self._slots, slots)
        from_, to = ends if direction is Direction.STORE else ends[::-1]
        num_bytes, copied = self._vram.shape[1], 0
        for dst, src in zip(to.tolist(), from_.tolist(), strict=True):
            ctypes.memmove(dst, src, num_bytes)
            copied += num_bytes
            if time.perf_counter() > deadline:
                break
        return copied

    def indexed(self, direction: Direction, blocks: BlockIds, slots: BlockIds) -> Copy | None:
        try:
            import torch
        except ImportError:
            return None
        src, dst = (torch.from_numpy(each) for each in self._ends(direction))
        ids = torch.from_numpy(blocks).long(), torch.from_numpy(slots).long()
        at, to = ids if direction is Direction.STORE else ids[::-1]

        def copy() -> None:
            dst.index_copy_(0, to, src.index_select(0, at))

        return copy

    def _ends(self, direction: Direction) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """(from, to)"""
        ends = self._vram, self._slots
        return ends if direction is Direction.STORE else (self._slots, self._vram)


def _addresses(memory: npt.NDArray[np.uint8], ids: BlockIds) -> Addresses:
    """Where the blocks are."""
    return ids.astype(np.uint64) * np.uint64(memory.shape[1]) + np.uint64(memory.ctypes.data)
