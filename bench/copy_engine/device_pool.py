"""How fast a host pool is populated and page-locked, by chunk size, with and without huge pages;
and how long a step's own copy waits meanwhile."""

from __future__ import annotations

import time

from bench.copy_engine.device_step import SMALL, WARM_UP, small_copy
from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, size, spread
from bench.copy_engine.rig import Rig
from bench.copy_engine.sizes import MIB, Sizes


def measure_pin(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """GB/s of both parts, as the pool's own state says, and of the whole call."""
    section = Section(
        "pin",
        f"Host pool of {size(sizes.pool_bytes)}, GB/s",
        ("chunk", "huge pages", "populate", "page-lock", "whole call"),
        note="`-`: that part took no time (the simulator locks nothing). Populating memory that "
        "this machine never touched before costs more than what is measured here later on.",
    )
    for chunk in sizes.pool_chunks:
        for huge in (False, True):
            say(f"pool, chunks of {size(chunk)}, huge pages {'on' if huge else 'off'}")
            with Rig(machine, 1, 4096) as rig:
                began = time.perf_counter()
                state = rig.engine.map_pool(sizes.pool_bytes, chunk, huge)
                whole_s = time.perf_counter() - began
            cells = [_rate(sizes, s) for s in (state.populate_s, state.lock_s, whole_s)]
            section.rows.append((size(chunk), "on" if huge else "off", *cells))
            section.samples[f"{chunk}, {'huge' if huge else 'small'}, whole call s"] = [whole_s]
    return section


def _rate(sizes: Sizes, seconds: float) -> str:
    return f"{sizes.pool_bytes / seconds / 1e9:.2f}" if seconds > 0 else "-"


def measure_growth(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """A small page-locked copy to VRAM while the rest of the pool is populated and locked."""
    section = Section(
        "growth",
        f"Copy of {size(SMALL)} to VRAM while a pool of {size(sizes.pool_bytes)} grows, us from "
        "call to end",
        ("chunk", "median", "p99", "max", "grown after, s"),
        note="First row: nothing grows. A larger chunk keeps the driver longer at a time.",
    )
    copy = small_copy(machine)
    idle = [copy() for _ in range(WARM_UP + sizes.small_copies)][WARM_UP:]
    section.samples["idle"] = idle
    section.rows.append(("-", *spread(idle), "-"))
    piece = min(MIB, sizes.pool_bytes)
    for chunk in sizes.pool_chunks:
        say(f"small copy, a pool grows by {size(chunk)}")
        tuning = {"first_bytes": piece, "chunk_bytes": chunk}
        with Rig(machine, sizes.pool_bytes // piece, piece, **tuning) as rig:
            began, found = time.perf_counter(), []
            while rig.engine.pool_state().is_growing or len(found) < sizes.small_copies:
                found.append(copy())
            grown_s = time.perf_counter() - began
        section.rows.append((size(chunk), *spread(found), f"{grown_s:.1f}"))
        section.samples[f"{chunk}"] = found
    return section
