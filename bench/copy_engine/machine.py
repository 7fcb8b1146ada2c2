"""Machine: the memory, streams and events that a measurement needs besides the engine.

CpuMachine stands in for a device where there is none: its "VRAM" is ordinary memory and its
streams do everything at once. Its numbers say nothing about a device; it shows that every
section runs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Buffer(Protocol):
    """Memory at `address`, for as long as the object lives."""

    address: int
    num_bytes: int


class Event(Protocol):
    """A point of a stream."""

    def seconds_since(self, earlier: Any) -> float:
        """Time between two events that were both reached."""
        ...


class Stream(Protocol):
    """A queue of device work; `handle` is what the engine's after_stream takes."""

    handle: int

    def copy(self, dst: Buffer, src: Buffer, num_bytes: int) -> None: ...
    def work(self) -> None:
        """One unit of decode-like computing, which waits for memory."""
        ...

    def record(self) -> Event: ...
    def synchronize(self) -> None: ...


class Pages(Protocol):
    """KV of some layers: a piece of each block for each layer."""

    def reader(self, stream: Any, order: Any) -> Callable[[int], None]:
        """What reads a layer's pieces of the blocks of `order`, on a stream of that machine."""
        ...


class Machine(Protocol):
    """Where memory and streams come from, and which driver the engine opens."""

    name: str
    driver: str
    device: int

    def vram(self, num_bytes: int) -> Buffer: ...
    def host(self, num_bytes: int) -> Buffer:
        """Page-locked memory."""
        ...

    def stream(self) -> Stream: ...
    def pages(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> Pages:
        """In VRAM: with `block_first` a block's layers lie together, else a layer's blocks."""
        ...


class CpuBuffer:
    def __init__(self, num_bytes: int) -> None:
        self.array = np.ones(num_bytes, dtype=np.uint8)  # ones: every page is touched
        self.address = int(self.array.ctypes.data)
        self.num_bytes = num_bytes


class CpuEvent:
    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def seconds_since(self, earlier: CpuEvent) -> float:
        return self.at_s - earlier.at_s


class CpuStream:
    """Runs what it is given before it returns."""

    handle = 0

    def copy(self, dst: Buffer, src: Buffer, num_bytes: int) -> None:
        ctypes.memmove(dst.address, src.address, num_bytes)

    def work(self) -> None:
        np.dot(_MATRIX, _MATRIX)

    def record(self) -> CpuEvent:
        return CpuEvent()

    def synchronize(self) -> None:
        return


class CpuPages:
    """An array of layers, blocks, bytes, whichever lies outermost."""

    def __init__(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> None:
        shape = (num_blocks, layers) if block_first else (layers, num_blocks)
        array = np.ones((*shape, piece), dtype=np.uint8)
        self.layers = array.swapaxes(0, 1) if block_first else array

    def reader(self, stream: CpuStream, order: Any) -> Callable[[int], None]:
        out = np.empty((len(order), self.layers.shape[2]), dtype=np.uint8)

        def read(layer: int) -> None:
            np.take(self.layers[layer], order, axis=0, out=out)

        return read


_MATRIX = np.ones((64, 64), dtype=np.float32)


class CpuMachine:
    """The simulated driver, and memory of this process."""

    name = "simulated device"
    driver = "sim"
    device = 0

    def vram(self, num_bytes: int) -> CpuBuffer:
        return CpuBuffer(num_bytes)

    def host(self, num_bytes: int) -> CpuBuffer:
        return CpuBuffer(num_bytes)

    def stream(self) -> CpuStream:
        return CpuStream()

    def pages(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> CpuPages:
        return CpuPages(num_blocks, layers, piece, block_first)
