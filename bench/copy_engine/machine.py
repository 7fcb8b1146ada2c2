"""Machine: the memory, streams and events that a measurement needs besides the engine, by torch.

Where there is no device, the CPU stands in for one: its "VRAM" is ordinary memory and its streams
do everything at once. Its numbers say nothing about a device; it shows that every section runs.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

WIDTH, ROWS, MATMULS = 8192, 64, 4  # 128 MiB of weights per product: more than an L2 holds
SMALL_WIDTH = 64  # of the stand-in


class Machine:
    """The simulated driver, and memory of this process; torch provides, the engine copies."""

    name = "simulated device"
    driver = "sim"  # that the engine opens
    where, width = "cpu", SMALL_WIDTH

    def vram(self, num_bytes: int) -> torch.Tensor:
        """Ones: every page is touched."""
        return torch.ones(num_bytes, dtype=torch.uint8, device=self.where)

    def host(self, num_bytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.ones(num_bytes, dtype=torch.uint8)

    def event(self) -> Any:
        """A point of a stream, once it is recorded."""
        return Moment()

    def synchronize(self) -> None:
        """Wait for all that any stream was given."""
        torch.get_device_module(self.where).synchronize()


class Device(Machine):
    """A GPU, the first that torch sees."""

    driver = "cuda"
    where, width = "cuda:0", WIDTH

    def __init__(self) -> None:
        self.name = str(torch.cuda.get_device_name())

    def host(self, num_bytes: int) -> torch.Tensor:
        return super().host(num_bytes).pin_memory()

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)


class Moment:
    """In place of torch's event, which no CPU has: now, for everything is done at once."""

    def record(self, _stream: object) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """It is over."""

    def elapsed_time(self, later: Moment) -> float:
        """Milliseconds, as torch has it."""
        return 1e3 * (later.at_s - self.at_s)


class Stream:
    """A queue of device work, which waits for no other; a CPU does at once what it is given."""

    def __init__(self, machine: Machine) -> None:
        machine.synchronize()  # buffers were filled on another stream
        self._machine = machine
        self._torch = torch.get_device_module(machine.where)
        self._stream = self._torch.Stream()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with self._torch.stream(self._stream):
            dst.copy_(src, non_blocking=True)

    def work(self) -> None:
        """One unit of decode-like computing, which waits for memory."""
        rows, weights, out = _matrices(self._machine)
        with self._torch.stream(self._stream):
            for _ in range(MATMULS):
                torch.mm(rows, weights, out=out)

    def record(self) -> Any:
        """A point of it, whose `elapsed_time` until a later one is in milliseconds."""
        event = self._machine.event()
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait for what it was given."""
        self.record().synchronize()


def find_device() -> Device | str:
    """The device, or why there is none."""
    return Device() if torch.cuda.is_available() else "torch sees no CUDA device"


@functools.cache
def _matrices(machine: Machine) -> tuple[Any, Any, Any]:
    def ones(rows: int) -> Any:
        return torch.ones(rows, machine.width, dtype=torch.bfloat16, device=machine.where)

    made = ones(ROWS), ones(machine.width), ones(ROWS)
    machine.synchronize()
    return made
