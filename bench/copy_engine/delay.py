"""From hand-over to the first copy, beside a step loop that holds the GIL.

Three ways to copy the same blocks take turns, a batch each, so that all see the same machine.
A delay begins before the hand-over and ends when the first copy is issued: for the engine at its
first driver call, for the Python threads right before theirs. Those issue all blocks by ONE call
(the best case for them: what a driver's batch call is); a call per block takes the GIL each time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Protocol

from bench.copy_engine.contenders import CopyThread, Handed, addresses, burn
from bench.copy_engine.machine import CpuBuffer, CpuMachine, Machine
from bench.copy_engine.report import Section, Target, spread
from bench.copy_engine.rig import Rig, another_core, checked
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.engine import Direction

AIM_MS = 5.0
HIGH = 98

Say = Callable[[str], None]


class Way(Protocol):
    """One way to copy: takes a batch, tells later when it was issued and done."""

    def hand_over(self) -> None: ...
    def take(self) -> Handed | None: ...
    def close(self) -> None: ...


class EngineWay:
    """The native engine."""

    def __init__(self, machine: Machine, sizes: Sizes) -> None:
        self._rig = Rig(machine, sizes.handed_blocks, sizes.handed_bytes)
        self._handed_ns = 0

    def hand_over(self) -> None:
        self._handed_ns = time.monotonic_ns()
        self._rig.submit(Direction.STORE, 0, self._rig.num_blocks)

    def take(self) -> Handed | None:
        for each in self._rig.engine.poll_timed():
            checked(each)
            blocks, slots = self._rig.blocks, self._rig.slots
            return Handed(blocks, slots, self._handed_ns, each.start_ns, each.done_ns)
        return None

    def close(self) -> None:
        self._rig.engine.close(5.0)


class ThreadWay:
    """A Python thread, with numpy for the addresses and `copy` for the bytes."""

    def __init__(self, rig: Rig, copy: Callable[[Handed], None]) -> None:
        self._rig = rig
        self._thread = CopyThread(copy)

    def hand_over(self) -> None:
        self._thread.hand_over(Handed(self._rig.blocks, self._rig.slots))

    def take(self) -> Handed | None:
        return self._thread.done.pop() if self._thread.done else None

    def close(self) -> None:
        self._thread.close()
        self._rig.engine.close(5.0)


def memmove_way(sizes: Sizes) -> ThreadWay:
    rig = Rig(CpuMachine(), sizes.handed_blocks, sizes.handed_bytes)
    base, pool = rig.vram.address, rig.engine.pool.base

    def copy(batch: Handed) -> None:
        addresses(base, batch.blocks, rig.piece_bytes)
        addresses(pool, batch.slots, rig.block_bytes)
        batch.issued_ns = time.monotonic_ns()
        ctypes.memmove(pool, base, rig.num_blocks * rig.block_bytes)

    return ThreadWay(rig, copy)


def torch_way(sizes: Sizes) -> ThreadWay | None:
    """None where torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    rig = Rig(CpuMachine(), sizes.handed_blocks, sizes.handed_bytes)
    assert isinstance(rig.vram, CpuBuffer)
    shape = (rig.num_blocks, rig.block_bytes)
    source = torch.from_numpy(rig.vram.array).view(shape)
    target = torch.from_numpy(rig.engine.pool.view()).view(shape)

    def copy(batch: Handed) -> None:
        blocks = torch.from_numpy(batch.blocks).long()
        slots = torch.from_numpy(batch.slots).long()
        batch.issued_ns = time.monotonic_ns()
        target.index_copy_(0, slots, source.index_select(0, blocks))

    return ThreadWay(rig, copy)


def measure_delay(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """Delay to the first copy and to the last, per way, in milliseconds."""
    ways: dict[str, Way] = {}
    with another_core():
        ways["engine"] = EngineWay(machine, sizes)
        ways["Python thread, one memmove"] = memmove_way(sizes)
        if (torch_thread := torch_way(sizes)) is not None:
            ways["Python thread, torch index copy"] = torch_thread
    num_bytes = sizes.handed_blocks * sizes.handed_bytes
    section = Section(
        "delay",
        f"Hand-over of {sizes.handed_blocks} blocks ({num_bytes >> 20} MiB) beside "
        f"{sizes.step_s * 1e3:g} ms steps of pure Python, ms",
        ("way", "issued: median", f"p{HIGH}", "max", "done: median", f"p{HIGH}", "max"),
        note="Copies run on another core than the steps; all take turns, a batch each.",
    )
    found: dict[str, list[Handed]] = {name: [] for name in ways}
    try:
        for step in range(sizes.steps):
            if step % max(1, sizes.steps // 4) == 0:
                say(f"hand-over, batch {step} of {sizes.steps}")
            for name, way in ways.items():
                found[name].append(_hand_over(way, sizes.step_s))
    finally:
        for way in ways.values():
            way.close()
    for name, batches in found.items():
        issued = [(each.issued_ns - each.handed_ns) / 1e6 for each in batches]
        done = [(each.done_ns - each.handed_ns) / 1e6 for each in batches]
        section.rows.append((name, *spread(issued, HIGH), *spread(done, HIGH)))
        section.samples[f"{name}, issued"] = issued
        section.samples[f"{name}, done"] = done
    high = float(section.rows[0][2])
    text = f"hand-over to issue by the engine, p{HIGH}"
    section.targets.append(Target(text, high, AIM_MS, "ms"))
    return section


def _hand_over(way: Way, step_s: float) -> Handed:
    """One batch at the begin of a step; steps go on until it is done."""
    way.hand_over()
    while True:
        burn(step_s)
        if (batch := way.take()) is not None:
            return batch
