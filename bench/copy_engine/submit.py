"""What the caller pays for a submit, in microseconds of the calling thread."""

from __future__ import annotations

import time

from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, Target, spread
from bench.copy_engine.rig import Rig, another_core, compute
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.abi import Direction

PIECE = 64  # bytes: what is copied does not matter here
BURST = 8  # transfers in a row: after the first the lane is awake
STEP_S = 0.005  # of compute between two transfers: the lane naps
PAUSE_S = 0.06  # longer than the lane naps: it sleeps, and must be woken
NO_TAG = 1 << 40
RARE = 5  # one in so many samples, where each takes a pause
AIM_US = 20.0


def measure_submit(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """Submit to a lane that is at work, that naps between steps, and that sleeps."""
    section = Section(
        "submit",
        f"Submit, us of the caller ({machine.name})",
        ("blocks", "regions", "lane", "median", "p99", "max"),
        note="The lane runs on another core. At work: one of a burst. Between steps: the caller "
        "computed for 5 ms since the last transfer, as a step does, and the lane naps. Nothing "
        "submitted: at such a moment, only the ids made bytes and an empty call of the library: "
        "what cold caches leave of any call. Asleep: the caller computed for 60 ms, and the lane "
        "has to be woken.",
    )
    for regions in sizes.regions:
        for blocks in sizes.blocks:
            say(f"submit, {blocks} blocks, {regions} regions")
            with another_core():
                rig = Rig(machine, BURST * blocks, PIECE, regions).started()
            with rig:
                for lane, measure in LANES.items():
                    samples = measure(rig, blocks, sizes.calls)
                    section.rows.append((str(blocks), str(regions), lane, *spread(samples)))
                    section.samples[f"{blocks} blocks, {regions} regions, {lane}"] = samples
    for lane in ("at work", "between steps"):
        most = [
            section.samples[f"{sizes.blocks[-1]} blocks, {regions} regions, {lane}"]
            for regions in sizes.regions
        ]
        worst = max(sorted(samples)[len(samples) // 2] for samples in most)
        text = f"submit of {sizes.blocks[-1]} blocks, lane {lane}, worst median ({machine.name})"
        section.targets.append(Target(text, worst, AIM_US, "us"))
    return section


def _after(pause_s: float, rig: Rig, blocks: int, calls: int) -> list[float]:
    samples = []
    for _ in range(calls):
        ids = rig.ids(0, blocks)
        began = time.perf_counter_ns()
        rig.give(Direction.STORE, *ids)
        samples.append((time.perf_counter_ns() - began) / 1e3)
        while not rig.engine.poll_timed():  # a worker polls; in a wait its core would sleep
            compute(STEP_S / 10)
        compute(pause_s)
    return samples


def _nothing_submitted(rig: Rig, blocks: int, calls: int) -> list[float]:
    """The same ids, as bytes, and a call into the library that finds nothing to do."""
    samples = []
    for _ in range(calls):
        ids = rig.ids(0, blocks)
        compute(STEP_S)
        began = time.perf_counter_ns()
        for each in ids:
            each.tobytes()
        rig.engine.cancel(NO_TAG)
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return samples


def _at_work(rig: Rig, blocks: int, calls: int) -> list[float]:
    samples: list[float] = []
    while len(samples) < calls:
        tags = []
        for i in range(BURST):
            ids = rig.ids(i * blocks, blocks)
            began = time.perf_counter_ns()
            tags.append(rig.give(Direction.STORE, *ids))
            if i:
                samples.append((time.perf_counter_ns() - began) / 1e3)
        for tag in tags:
            rig.wait(tag)
        rig.engine.poll_timed()
    return samples


LANES = {
    "at work": _at_work,
    "between steps": lambda rig, blocks, calls: _after(STEP_S, rig, blocks, calls),
    "(nothing submitted)": _nothing_submitted,
    "asleep": lambda rig, blocks, calls: _after(PAUSE_S, rig, blocks, -(-calls // RARE)),
}
