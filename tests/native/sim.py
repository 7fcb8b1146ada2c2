"""What the simulated driver lets a test do to a native engine; the CUDA driver refuses it."""

from __future__ import annotations

import ctypes
import functools

from continuum_connector.messages import BlockIds
from continuum_connector.worker import abi
from continuum_connector.worker.native import PATHS, NativeEngine, check

_i32, _i64, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64
SPECULATIVE = 1  # a flag of ckv_submit, which the connector never sets


class SimStats(ctypes.Structure):
    """What the simulator saw; the pairs are (load, store)."""

    _fields_ = (
        ("max_bytes_in_flight", _u64 * 2),
        ("num_descriptors", _u64 * 2),
        ("num_copy_calls", _u64 * 2),
        ("num_driver_calls", _u64),
        ("num_stopped", _u64),
        ("num_copied", _u64 * 2),
        ("num_violations", _u64),
        ("num_disk_calls", _u64),
        ("num_disk_stopped", _u64),
    )


SIGNATURES: abi.Signatures = {
    "ckv_sim_hold": (_i32, (_ptr, _i32)),
    "ckv_sim_fail": (_i32, (_ptr, _u64, _u64, _i32)),
    "ckv_sim_fail_at": (_i32, (_ptr, _i32, _u64, _u64, _i32)),
    "ckv_sim_stop": (_i32, (_ptr, _u64)),
    "ckv_sim_set_paths": (_i32, (_ptr, _u32)),
    "ckv_sim_set_grace": (_i32, (_ptr, _i64)),
    "ckv_sim_fail_path": (_i32, (_ptr, _i32, _i32)),
    "ckv_sim_stream": (_i32, (_ptr, _ptr)),
    "ckv_sim_compute": (_i32, (_ptr, _ptr, _ptr, _i32, _u64, _u64)),
    "ckv_sim_block": (_i32, (_ptr, _ptr, _i32)),
    "ckv_sim_watch": (_i32, (_ptr, _i32)),
    "ckv_sim_get_stats": (_i32, (_ptr, _ptr)),
    "ckv_sim_disk_fail_at": (_i32, (_ptr, _i32, _u64, _u64, _i32)),
    "ckv_sim_disk_tear": (_i32, (_ptr, _u64, _u64, _i32)),
    "ckv_sim_disk_stop": (_i32, (_ptr, _i32, _u64)),
    "ckv_sim_disk_mbps": (_i32, (_ptr, _u32)),
}


@functools.cache
def _library() -> ctypes.CDLL:
    library, _ = abi.load_library()
    abi.declare(library, SIGNATURES)
    return library


def submit_speculative(
    engine: NativeEngine, way: int, blocks: BlockIds, slots: BlockIds, tag: int
) -> None:
    """Queue a load that nobody waits for yet."""
    raw, n = (blocks.tobytes(), slots.tobytes()), len(blocks)
    check(engine._quick.ckv_submit(engine._opened(), way, SPECULATIVE, *raw, n, 0, tag))


def hold(engine: NativeEngine) -> None:
    """From here on no copy begins: what is submitted stays in flight."""
    check(_library().ckv_sim_hold(engine._opened(), 1))


def release(engine: NativeEngine) -> None:
    """Let the copies go on."""
    check(_library().ckv_sim_hold(engine._opened(), 0))


def watch(engine: NativeEngine) -> None:
    """From here on it counts who writes blocks under a copy."""
    check(_library().ckv_sim_watch(engine._opened(), 1))


def fail_after(engine: NativeEngine, num_calls: int, count: int = 1, code: int = 1) -> None:
    """After `num_calls` driver calls, fail `count`; code 700 ends the device context."""
    check(_library().ckv_sim_fail(engine._opened(), num_calls, count, code))


def fail_path(engine: NativeEngine, path: str, code: int = 1) -> None:
    """From here on every copy call on the path fails with `code`; 0: no more."""
    check(_library().ckv_sim_fail_path(engine._opened(), PATHS[path], code))


def stream(engine: NativeEngine) -> int:
    """A compute stream, for `after_stream`; lives as long as the engine."""
    made = ctypes.c_void_p()
    check(_library().ckv_sim_stream(engine._opened(), ctypes.byref(made)))
    return made.value or 0


def compute(
    engine: NativeEngine, on: int, delay_s: float, at: int = 0, value: int = 0, num_bytes: int = 0
) -> None:
    """Queue a kernel on the stream `on` that takes time, then sets `num_bytes` to `value`."""
    delay_us = int(delay_s * 1e6)
    opened = engine._opened()
    check(_library().ckv_sim_compute(opened, on, at, value, num_bytes, delay_us))


def block(engine: NativeEngine, stream: int, on: bool = True) -> None:
    """Keep a compute stream from finishing what is queued, or let it go on."""
    check(_library().ckv_sim_block(engine._opened(), stream, int(on)))


DISK_ENTRIES = {"open": 0, "lock": 1, "allocate": 2, "read": 3, "write": 4, "sync": 5}


def fail_disk(engine: NativeEngine, entry: str, num_calls: int, count: int, code: int) -> None:
    """After `num_calls` calls of one entry point of its files, `count` fail with an errno."""
    at, opened = DISK_ENTRIES[entry], engine._opened()
    check(_library().ckv_sim_disk_fail_at(opened, at, num_calls, count, code))


def stop_disk(engine: NativeEngine, entry: str, num_calls: int = 0) -> None:
    """After `num_calls` calls of one entry point of its files, all hang."""
    at, opened = DISK_ENTRIES[entry], engine._opened()
    check(_library().ckv_sim_disk_stop(opened, at, num_calls))


def let_disk_go(engine: NativeEngine, entry: str) -> None:
    """Calls that hang go on, and no other will."""
    stop_disk(engine, entry, 2**64 - 1)


def stats(engine: NativeEngine) -> SimStats:
    """What the simulated driver saw so far."""
    seen = SimStats()
    check(_library().ckv_sim_get_stats(engine._opened(), ctypes.byref(seen)))
    return seen
