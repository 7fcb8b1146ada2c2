"""HostPool: the DRAM that holds the slots, mapped and page-locked by the native library."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import TransferError
from continuum_connector.worker import abi
from continuum_connector.worker.engine import PoolState

_ETIMEOUT = -5  # CKV_TIMEOUT


class HostPool:
    """`num_bytes` of zeroed memory at address `base`; belongs to one native engine.

    Under CUDA the first `first_bytes` (0: all) are populated and page-locked when this returns
    (seconds per 10 GiB) and the rest follows on a native thread, `chunk_bytes` (0: 1 GiB) at a
    time; what cannot be had stays out of `ready_bytes`. Under the simulator pages are touched only
    by use, and all are ready. A fork does not inherit it. `numa` prefers memory next to the device.
    """

    def __init__(
        self,
        handle: ctypes.c_void_p,
        num_bytes: int,
        huge_pages: bool = True,
        numa: bool = True,
        first_bytes: int = 0,
        chunk_bytes: int = 0,
    ) -> None:
        self._blocking, self._quick = abi.load_library()
        base = ctypes.c_void_p()
        config = abi.PoolConfig(
            size=ctypes.sizeof(abi.PoolConfig),
            huge=huge_pages,
            numa_node=abi.NUMA_DEVICE if numa else abi.NUMA_ANY,
            bytes=num_bytes,
            chunk_bytes=chunk_bytes,
            first_bytes=min(first_bytes, num_bytes),
        )
        code = self._blocking.ckv_pool_map(handle, ctypes.byref(config), ctypes.byref(base))
        if code != 0 or not base.value:
            raise TransferError(f"no host pool: {self._quick.ckv_last_error().decode()}.")
        self._handle = handle
        self.num_bytes = num_bytes
        self.base: int = base.value

    def state(self) -> PoolState:
        """How far it has come; microseconds."""
        if self.base == 0:
            raise TransferError("the host pool is closed.")
        raw = abi.PoolState(size=ctypes.sizeof(abi.PoolState))
        code = self._quick.ckv_pool_get_state(self._handle, self.base, ctypes.byref(raw))
        if code != 0:
            raise TransferError(f"no pool state: {self._quick.ckv_last_error().decode()}.")
        return PoolState(
            ready_bytes=raw.ready_bytes,
            mapped_bytes=raw.mapped_bytes,
            is_growing=bool(raw.is_growing),
            why=raw.why.decode(errors="replace"),
            numa_node=raw.numa_node,
            populate_s=raw.populate_s,
            lock_s=raw.lock_s,
        )

    def wait(self, timeout_s: float) -> bool:
        """Block, without the GIL, until it grows no more. False: it still does."""
        code = self._blocking.ckv_pool_wait(self._handle, self.base, int(timeout_s * 1e6))
        if code not in (0, _ETIMEOUT):
            raise TransferError(f"no pool to wait for: {self._quick.ckv_last_error().decode()}.")
        return bool(code == 0)

    def view(self) -> npt.NDArray[np.uint8]:
        """The pool as bytes, not a copy; must not be used after `close`."""
        if self.base == 0:
            raise TransferError("the host pool is closed.")
        array_type = ctypes.c_uint8 * self.num_bytes
        return np.ctypeslib.as_array(array_type.from_address(self.base))

    def close(self) -> None:
        """Unmap. The engine refuses while it may still copy; idempotent."""
        if self.base == 0:
            return
        code = self._blocking.ckv_pool_unmap(self._handle, ctypes.c_void_p(self.base))
        if code != 0:
            raise TransferError(f"the host pool stays: {self._quick.ckv_last_error().decode()}.")
        self.base = 0
