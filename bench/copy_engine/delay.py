"""From hand-over to the first copy and to the last, beside a step loop that holds the GIL."""

from __future__ import annotations

import time

from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, Target, spread
from bench.copy_engine.rig import Rig, another_core, checked, compute
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker import abi
from continuum_connector.worker.abi import Direction

AIM_MS = 5.0
HIGH = 98


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
