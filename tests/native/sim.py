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


def stats(engine: NativeEngine) -> abi.SimStats:
    """What the simulated driver saw so far."""
    seen = abi.SimStats()
    engine._check(engine._blocking.ckv_sim_get_stats(engine._opened(), ctypes.byref(seen)))
    return seen
