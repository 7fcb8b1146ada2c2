"""Machine: the memory, streams and events that a measurement needs besides the engine.

CpuMachine stands in for a device where there is none: its "VRAM" is ordinary memory and its
streams do everything at once. Its numbers say nothing about a device; it shows that every
section runs. torch_machine.py has the same for a real one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Buffer = Pages = Stream = Machine = Any  # those of this file, or of torch_machine.py


class CpuBuffer:
    """Memory at `address`, for as long as the object lives."""

    def __init__(self, num_bytes: int) -> None:
        self.array = np.ones(num_bytes, dtype=np.uint8)  # ones: every page is touched
        self.address = int(self.array.ctypes.data)
        self.num_bytes = num_bytes


class CpuEvent:
    """A point of a stream."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def seconds_since(self, earlier: CpuEvent) -> float:
        """Time between two events that were both reached."""
        return self.at_s - earlier.at_s


class CpuStream:
    """A queue of device work: runs what it is given before it returns."""

    handle = 0  # what the engine's after_stream takes

    def copy(self, dst: Buffer, src: Buffer, num_bytes: int) -> None:
        ctypes.memmove(dst.address, src.address, num_bytes)

    def work(self) -> None:
        """One unit of decode-like computing, which waits for memory."""
        np.dot(_MATRIX, _MATRIX)

    def record(self) -> CpuEvent:
        return CpuEvent()

    def synchronize(self) -> None:
        return


class CpuPages:
    """KV of some layers, a piece of each block for each layer: an array of layers, blocks, bytes,
    whichever lies outermost."""

    def __init__(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> None:
        shape = (num_blocks, layers) if block_first else (layers, num_blocks)
        array = np.ones((*shape, piece), dtype=np.uint8)
        self.layers = array.swapaxes(0, 1) if block_first else array

    def reader(self, stream: CpuStream, order: Any) -> Callable[[int], None]:
        """What reads a layer's pieces of the blocks of `order`, on a stream of that machine."""
        out = np.empty((len(order), self.layers.shape[2]), dtype=np.uint8)

        def read(layer: int) -> None:
            np.take(self.layers[layer], order, axis=0, out=out)

        return read


_MATRIX = np.ones((64, 64), dtype=np.float32)


class CpuMachine:
    """The simulated driver, and memory of this process."""

    name = "simulated device"
    driver = "sim"  # that the engine opens
    device = 0

    def vram(self, num_bytes: int) -> CpuBuffer:
        return CpuBuffer(num_bytes)

    def host(self, num_bytes: int) -> CpuBuffer:
        """Page-locked memory."""
        return CpuBuffer(num_bytes)

    def stream(self) -> CpuStream:
        return CpuStream()

    def pages(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> CpuPages:
        """In VRAM: with `block_first` a block's layers lie together, else a layer's blocks."""
        return CpuPages(num_blocks, layers, piece, block_first)
