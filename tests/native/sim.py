"""What the simulated driver lets a test do to a native engine; the CUDA driver refuses it."""

from __future__ import annotations

import ctypes

from continuum_connector.worker import abi
from continuum_connector.worker.native import PATHS, NativeEngine


def hold(engine: NativeEngine) -> None:
    """From here on no copy begins: what is submitted stays in flight."""
    engine._check(engine._blocking.ckv_sim_hold(engine._opened(), 1))


def release(engine: NativeEngine) -> None:
    """Let the copies go on."""
    engine._check(engine._blocking.ckv_sim_hold(engine._opened(), 0))


def watch(engine: NativeEngine) -> None:
    """From here on it counts who writes blocks under a copy."""
    engine._check(engine._blocking.ckv_sim_watch(engine._opened(), 1))


def fail_after(engine: NativeEngine, num_calls: int, count: int = 1, code: int = 1) -> None:
    """After `num_calls` driver calls, fail `count`; code 700 ends the device context."""
    engine._check(engine._blocking.ckv_sim_fail(engine._opened(), num_calls, count, code))


def fail_path(engine: NativeEngine, path: str, code: int = 1) -> None:
    """From here on every copy call on the path fails with `code`; 0: no more."""
    engine._check(engine._blocking.ckv_sim_fail_path(engine._opened(), PATHS[path], code))


def stream(engine: NativeEngine) -> int:
    """A compute stream, for `after_stream`; lives as long as the engine."""
    made = ctypes.c_void_p()
    engine._check(engine._blocking.ckv_sim_stream(engine._opened(), ctypes.byref(made)))
    return made.value or 0


def compute(engine: NativeEngine, on: int, delay_s: float) -> None:
    """Queue a kernel that only takes time on the stream `on`."""
    delay_us = int(delay_s * 1e6)
    opened = engine._opened()
    engine._check(engine._blocking.ckv_sim_compute(opened, on, None, 0, 0, delay_us))


def block(engine: NativeEngine, stream: int, on: bool = True) -> None:
    """Keep a compute stream from finishing what is queued, or let it go on."""
    engine._check(engine._blocking.ckv_sim_block(engine._opened(), stream, int(on)))


DISK_ENTRIES = {"open": 0, "lock": 1, "allocate": 2, "read": 3, "write": 4, "sync": 5}


def fail_disk(engine: NativeEngine, entry: str, num_calls: int, count: int, code: int) -> None:
    """After `num_calls` calls of one entry point of its files, `count` fail with an errno."""
    at, opened = DISK_ENTRIES[entry], engine._opened()
    engine._check(engine._blocking.ckv_sim_disk_fail_at(opened, at, num_calls, count, code))


def stop_disk(engine: NativeEngine, entry: str, num_calls: int = 0) -> None:
    """After `num_calls` calls of one entry point of its files, all hang."""
    at, opened = DISK_ENTRIES[entry], engine._opened()
    engine._check(engine._blocking.ckv_sim_disk_stop(opened, at, num_calls))


def let_disk_go(engine: NativeEngine, entry: str) -> None:
    """Calls that hang go on, and no other will."""
    stop_disk(engine, entry, 2**64 - 1)


def stats(engine: NativeEngine) -> abi.SimStats:
    """What the simulated driver saw so far."""
    seen = abi.SimStats()
    engine._check(engine._blocking.ckv_sim_get_stats(engine._opened(), ctypes.byref(seen)))
    return seen
