"""NativeEngine: the CopyEngine of csrc/, over ctypes.

Calls that take microseconds keep the GIL (PyDLL): giving it up costs up to a switch interval
when another thread wants it. Calls that block release it (CDLL).
"""

from __future__ import annotations

import ctypes

from continuum_connector.worker.engine import Completion

ABI_VERSION = 1
DRIVERS = {"cuda": 1, "sim": 2}
PATHS = {"auto": 0, "batch": 1, "loop": 2}

_CLOSED = -4
_TIMEOUT = -5
_MAX_POLLED = 256
_EMPTY: list[Completion] = []


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("driver", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("max_descriptors", ctypes.c_uint32),
        ("trunk_bytes", ctypes.c_uint64),
        ("window_bytes", ctypes.c_uint64 * 2),
        ("max_transfers", ctypes.c_uint32),
        ("sim_mbps", ctypes.c_uint32),
    )


class _Region(ctypes.Structure):
    _fields_ = (
        ("dev_base", ctypes.c_uint64),
        ("dev_stride", ctypes.c_uint64),
        ("host_base", ctypes.c_uint64),
        ("host_stride", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


class _Completion(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("bytes", ctypes.c_uint64),
        ("submit_ns", ctypes.c_uint64),
        ("start_ns", ctypes.c_uint64),
        ("done_ns", ctypes.c_uint64),
    )


class _SimStats(ctypes.Structure):
    _fields_ = (
        ("max_bytes_in_flight", ctypes.c_uint64 * 2),
        ("num_descriptors", ctypes.c_uint64 * 2),
        ("num_copy_calls", ctypes.c_uint64 * 2),
        ("num_driver_calls", ctypes.c_uint64),
    )


_handle, _i32, _u32, _i64, _u64 = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_uint64,
)
_size, _pointer = ctypes.c_size_t, ctypes.c_void_p

_BLOCKING = {
    "ckv_abi_version": (_i32, []),
    "ckv_last_error": (ctypes.c_char_p, []),
    "ckv_open": (_i32, [_pointer, _pointer]),
    "ckv_set_regions": (_i32, [_handle, _pointer, _size, _i32, _i32]),
    "ckv_pending_word": (_pointer, [_handle]),
    "ckv_wait": (_i32, [_handle, _u64, _i64]),
    "ckv_close": (_i32, [_handle, _i64]),
    "ckv_free": (None, [_handle]),
    "ckv_path": (_i32, [_handle]),
    "ckv_pool_map": (_i32, [_handle, _u64, _i32, _pointer]),
    "ckv_pool_unmap": (_i32, [_handle, _pointer]),
    "ckv_sim_hold": (_i32, [_handle, _i32]),
    "ckv_sim_fail": (_i32, [_handle, _u64, _u64, _i32]),
    "ckv_sim_stream": (_i32, [_handle, _pointer]),
    "ckv_sim_compute": (_i32, [_handle, _pointer, _pointer, _i32, _u64, _u64]),
    "ckv_sim_block": (_i32, [_handle, _pointer, _i32]),
    "ckv_sim_get_stats": (_i32, [_handle, _pointer]),
}
_QUICK = {
    "ckv_last_error": (ctypes.c_char_p, []),
    "ckv_submit": (_i32, [_handle, _i32, _pointer, _pointer, _size, _pointer, _u64]),
    "ckv_poll": (_size, [_handle, _pointer, _size]),
    "ckv_cancel": (_i32, [_handle, _u64]),
}
