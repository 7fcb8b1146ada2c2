"""Rivals of the engine on a real device: torch's copies, on a stream of their own."""

from __future__ import annotations

import time
from typing import Any

from bench.copy_engine.rivals import Copy
from continuum_connector.messages import BlockIds
from continuum_connector.worker.engine import Direction


class TorchRivals:
    """Blocks at `where`, page-locked slots, and a page-locked place between them."""

    def __init__(self, where: str, num_blocks: int, block_bytes: int) -> None:
        import torch

        shape = (num_blocks, block_bytes)
        self._where = where
        self._vram = torch.ones(shape, dtype=torch.uint8, device=where)
        self._slots = torch.ones(shape, dtype=torch.uint8).pin_memory()
        self._between = torch.ones(shape, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize()
        self._stream = torch.cuda.Stream()

    def one(self, direction: Direction) -> None:
        import torch

        src, dst = self._ends(direction)
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)
        self._stream.synchronize()

    def each(
        self, direction: Direction, blocks: BlockIds, slots: BlockIds, patience_s: float
    ) -> int:
        import torch

        deadline = time.perf_counter() + patience_s
        src, dst = self._ends(direction)
        ids = (blocks, slots) if direction is Direction.STORE else (slots, blocks)
        copied = 0
        with torch.cuda.stream(self._stream):
            for at, to in zip(*(each.tolist() for each in ids), strict=True):
                dst[to].copy_(src[at], non_blocking=True)
                copied += src.shape[1]
                if time.perf_counter() > deadline:
                    break
        self._stream.synchronize()
        return copied

    def indexed(self, direction: Direction, blocks: BlockIds, slots: BlockIds) -> Copy:
        """A store gathers in VRAM, crosses the bus in one piece and spreads in DRAM; a load
        goes the same way back. The ids are in VRAM when this returns."""
        import torch

        with torch.cuda.stream(self._stream):
            at = torch.from_numpy(blocks).long().to(self._where)
        to, between = torch.from_numpy(slots).long(), self._between[: len(slots)]

        def store() -> None:
            with torch.cuda.stream(self._stream):
                between.copy_(self._vram.index_select(0, at), non_blocking=True)
            self._stream.synchronize()
            self._slots.index_copy_(0, to, between)

        def load() -> None:
            torch.index_select(self._slots, 0, to, out=between)
            with torch.cuda.stream(self._stream):
                crossed = between.to(self._where, non_blocking=True)
                self._vram.index_copy_(0, at, crossed)
            self._stream.synchronize()

        return store if direction is Direction.STORE else load

    def _ends(self, direction: Direction) -> tuple[Any, Any]:
        """(from, to)"""
        ends = self._vram, self._slots
        return ends if direction is Direction.STORE else ends[::-1]
