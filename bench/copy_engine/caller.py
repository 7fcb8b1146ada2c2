"""What the caller pays for a submit, in microseconds of the calling thread; and how soon what it
hands over is copied, beside a step loop that holds the GIL."""

from __future__ import annotations

import time

from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, Target, spread
from bench.copy_engine.rig import Rig, another_core, checked, compute
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker import abi
from continuum_connector.worker.abi import Direction

PIECE = 64  # bytes: what is copied does not matter here
BURST = 8  # transfers in a row: after the first the lane is awake
STEP_S = 0.005  # of compute between two transfers: the lane naps
PAUSE_S = 0.06  # longer than the lane naps: it sleeps, and must be woken
NO_TAG = 1 << 40
RARE = 5  # one in so many samples, where each takes a pause
AIM_US, AIM_MS = 20.0, 5.0
HIGH = 98  # percentile of a hand-over


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


# --- hand-over --------------------------------------------------------------------------------
def measure_delay(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """Milliseconds from before the hand-over to the first driver call, and to the end."""
    with another_core():
        rig = Rig(machine, sizes.handed_blocks, sizes.handed_bytes).started()
    num_bytes = sizes.handed_blocks * sizes.handed_bytes
    section = Section(
        "delay",
        f"Hand-over of {sizes.handed_blocks} blocks ({num_bytes >> 20} MiB) beside "
        f"{sizes.step_s * 1e3:g} ms steps of pure Python, ms ({machine.name})",
        ("issued: median", f"p{HIGH}", "max", "done: median", f"p{HIGH}", "max"),
        note="Copies run on another core than the steps.",
    )
    issued, done = list[float](), list[float]()
    with rig:
        for step in range(sizes.steps):
            if step % max(1, sizes.steps // 4) == 0:
                say(f"hand-over, batch {step} of {sizes.steps}")
            began = time.monotonic_ns()
            rig.submit(Direction.STORE, 0, rig.num_blocks)
            ended = _steps_until_done(rig, sizes.step_s)
            issued.append((ended.start_ns - began) / 1e6)
            done.append((ended.done_ns - began) / 1e6)
    section.rows.append((*spread(issued, HIGH), *spread(done, HIGH)))
    section.samples |= {"issued": issued, "done": done}
    text = f"hand-over to issue by the engine, p{HIGH} ({machine.name})"
    section.targets.append(Target(text, float(section.rows[0][1]), AIM_MS, "ms"))
    return section


def _steps_until_done(rig: Rig, step_s: float) -> abi.RawCompletion:
    while True:
        compute(step_s)  # pure Python: it holds the GIL and gives it up only when asked to
        for each in rig.engine.poll_timed():
            return checked(each)
