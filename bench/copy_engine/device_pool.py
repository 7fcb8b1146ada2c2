"""How fast a host pool is populated and page-locked, by chunk size, with and without huge pages."""

from __future__ import annotations

import time

from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, size
from bench.copy_engine.rig import Rig
from bench.copy_engine.sizes import Sizes


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
