"""From hand-over to the first copy, beside a step loop that holds the GIL.

Three ways to copy the same blocks take turns, a batch each, so that all see the same machine.
A delay begins before the hand-over and ends when the first copy is issued: for the engine at its
first driver call, for the Python threads right before theirs. Those issue all blocks by ONE call
(the best case for them: what a driver's batch call is); a call per block takes the GIL each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from bench.copy_engine.contenders import CopyThread, Handed, burn
from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, Target, spread
from bench.copy_engine.rig import Rig, another_core, checked
from bench.copy_engine.rivals import Copy
from bench.copy_engine.sizes import Sizes
from continuum_connector.messages import BlockIds
from continuum_connector.worker.engine import Direction

AIM_MS = 5.0
HIGH = 98

Ids = tuple[BlockIds, BlockIds]  # blocks, slots


class Way(Protocol):
    """One way to copy: takes a batch, tells later when it was issued and done."""

    def hand_over(self) -> None: ...
    def take(self) -> Handed | None: ...
    def close(self) -> None: ...


class EngineWay:
    """The native engine."""

    def __init__(self, machine: Machine, sizes: Sizes) -> None:
        self._rig = Rig(machine, sizes.handed_blocks, sizes.handed_bytes).started()
        self._handed_ns = 0

    @property
    def ids(self) -> Ids:
        return self._rig.blocks, self._rig.slots

    def hand_over(self) -> None:
        self._handed_ns = time.monotonic_ns()
        self._rig.submit(Direction.STORE, 0, self._rig.num_blocks)

    def take(self) -> Handed | None:
        for each in self._rig.engine.poll_timed():
            checked(each)
            return Handed(*self.ids, self._handed_ns, each.start_ns, each.done_ns)
        return None

    def close(self) -> None:
        self._rig.engine.close(5.0)


class ThreadWay:
    """A Python thread that runs what `prepare` makes of a batch's ids."""

    def __init__(self, ids: Ids, prepare: Callable[[BlockIds, BlockIds], Copy]) -> None:
        self._ids = ids
        self._prepare = prepare
        self._thread = CopyThread(self._copy)

    def hand_over(self) -> None:
        self._thread.hand_over(Handed(*self._ids))

    def take(self) -> Handed | None:
        return self._thread.done.pop() if self._thread.done else None

    def close(self) -> None:
        self._thread.close()

    def _copy(self, batch: Handed) -> None:
        copy = self._prepare(batch.blocks, batch.slots)
        batch.issued_ns = time.monotonic_ns()
        copy()


def make_ways(machine: Machine, sizes: Sizes) -> dict[str, Way]:
    """The engine first, then the rivals there are; each with memory of its own."""
    engine = EngineWay(machine, sizes)
    ids = engine.ids
    rivals = machine.rivals(sizes.handed_blocks, sizes.handed_bytes)
    ways: dict[str, Way] = {"engine": engine}

    def one(_blocks: BlockIds, _slots: BlockIds) -> Copy:
        return lambda: rivals.one(Direction.STORE)

    ways["Python thread, one copy"] = ThreadWay(ids, one)
    if rivals.indexed(Direction.STORE, *ids) is not None:

        def indexed(blocks: BlockIds, slots: BlockIds) -> Copy:
            copy = rivals.indexed(Direction.STORE, blocks, slots)
            assert copy is not None
            return copy

        ways["Python thread, torch index copy"] = ThreadWay(ids, indexed)
    return ways


def measure_delay(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """Delay to the first copy and to the last, per way, in milliseconds."""
    with another_core():
        ways = make_ways(machine, sizes)
    num_bytes = sizes.handed_blocks * sizes.handed_bytes
    section = Section(
        "delay",
        f"Hand-over of {sizes.handed_blocks} blocks ({num_bytes >> 20} MiB) beside "
        f"{sizes.step_s * 1e3:g} ms steps of pure Python, ms ({machine.name})",
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
    text = f"hand-over to issue by the engine, p{HIGH} ({machine.name})"
    section.targets.append(Target(text, high, AIM_MS, "ms"))
    return section


def _hand_over(way: Way, step_s: float) -> Handed:
    """One batch at the begin of a step; steps go on until it is done."""
    way.hand_over()
    while True:
        burn(step_s)
        if (batch := way.take()) is not None:
            return batch
