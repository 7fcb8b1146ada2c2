"""Machine: the memory, streams and events that a measurement needs besides the engine, by torch.

Where there is no device, the CPU stands in for one: its "VRAM" is ordinary memory and its streams
do everything at once. Its numbers say nothing about a device; it shows that every section runs.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

WIDTH, ROWS, MATMULS = 8192, 64, 4  # 128 MiB of weights per product: more than an L2 holds
SMALL_WIDTH = 64  # of the stand-in


class Buffer:
    """Memory at `address`, for as long as the object lives."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.address = int(tensor.data_ptr())
        self.num_bytes = int(tensor.numel())


class Machine:
    """The simulated driver, and memory of this process; torch provides, the engine copies."""

    name = "simulated device"
    driver = "sim"  # that the engine opens
    where, width = "cpu", SMALL_WIDTH
    device = 0

    def vram(self, num_bytes: int) -> Buffer:
        """Ones: every page is touched."""
        return Buffer(torch.ones(num_bytes, dtype=torch.uint8, device=self.where))

    def host(self, num_bytes: int) -> Buffer:
        """Page-locked memory."""
        return Buffer(torch.ones(num_bytes, dtype=torch.uint8))

    def stream(self) -> Stream:
        """A stream of its own, which no other waits for."""
        return Stream(self)

    def pages(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> Pages:
        """In VRAM: with `block_first` a block's layers lie together, else a layer's blocks."""
        return Pages(self, num_blocks, layers, piece, block_first)

    def synchronize(self) -> None:
        """Wait for all that any stream was given."""


class Device(Machine):
    """A GPU."""

    driver = "cuda"
    width = WIDTH

    def __init__(self, device: int) -> None:
        torch.cuda.set_device(device)
        self.device = device
        self.where = f"cuda:{device}"
        self.name = str(torch.cuda.get_device_name(device))

    def host(self, num_bytes: int) -> Buffer:
        return Buffer(super().host(num_bytes).tensor.pin_memory())

    def stream(self) -> Stream:
        self.synchronize()  # buffers were filled on another stream
        return DeviceStream(self)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class Stream:
    """A queue of device work: this one runs what it is given before it returns."""

    handle = 0  # what the engine's after_stream takes

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def on(self) -> contextlib.AbstractContextManager[Any]:
        """What torch is asked for inside runs on this stream."""
        return contextlib.nullcontext()

    def copy(self, dst: Buffer, src: Buffer, num_bytes: int) -> None:
        with self.on():
            dst.tensor[:num_bytes].copy_(src.tensor[:num_bytes], non_blocking=True)

    def work(self) -> None:
        """One unit of decode-like computing, which waits for memory."""
        rows, weights, out = _matrices(self.machine)
        with self.on():
            for _ in range(MATMULS):
                torch.mm(rows, weights, out=out)

    def record(self) -> Event:
        """A point of this stream."""
        return Event()

    def synchronize(self) -> None:
        """Wait for what it was given."""


class DeviceStream(Stream):
    """Of a GPU."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._stream = torch.cuda.Stream(machine.where)
        self.handle = int(self._stream.cuda_stream)

    def on(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        return DeviceEvent(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


class Event:
    """A point of a stream: now, where everything is done at once."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def seconds_since(self, earlier: Any) -> float:
        """Time between two events that were both reached."""
        return float(self.at_s - earlier.at_s)


class DeviceEvent(Event):
    """Of a GPU's stream."""

    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def seconds_since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class Pages:
    """KV of some layers, a piece of each block for each layer: a tensor of layers, blocks, words,
    whichever lies outermost."""

    def __init__(
        self, machine: Machine, num_blocks: int, layers: int, piece: int, block_first: bool
    ) -> None:
        self._machine = machine
        shape = (num_blocks, layers) if block_first else (layers, num_blocks)
        tensor = torch.ones((*shape, piece // 8), dtype=torch.int64, device=machine.where)
        self.layers = tensor.transpose(0, 1) if block_first else tensor

    def reader(self, stream: Stream, order: Any) -> Callable[[int], None]:
        """What reads a layer's pieces of the blocks of `order`, on a stream of that machine."""
        ids = torch.as_tensor(order, device=self.layers.device)
        out = self.layers.new_empty(len(order), self.layers.shape[2])
        self._machine.synchronize()  # the ids were copied on another stream

        def read(layer: int) -> None:
            with stream.on():
                torch.index_select(self.layers[layer], 0, ids, out=out)

        return read


def find_device(device: int) -> Device | str:
    """The device, or why there is none."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device >= torch.cuda.device_count():
        return f"device {device} is not in 0..{torch.cuda.device_count() - 1}"
    return Device(device)


@functools.cache
def _matrices(machine: Machine) -> tuple[Any, Any, Any]:
    def ones(rows: int) -> Any:
        return torch.ones(rows, machine.width, dtype=torch.bfloat16, device=machine.where)

    made = ones(ROWS), ones(machine.width), ones(ROWS)
    machine.synchronize()
    return made
