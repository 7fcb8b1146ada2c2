"""HostPool: the DRAM that holds the slots, mapped and page-locked by the native library."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import TransferError
from continuum_connector.worker import abi


class HostPool:
    """`num_bytes` of zeroed memory at address `base`; belongs to one native engine.

    Under CUDA it is populated and page-locked when this returns (seconds per 10 GiB);
    under the simulator pages are touched only by use. A fork does not inherit it.
    """

    def __init__(
        self, lib: ctypes.CDLL, handle: ctypes.c_void_p, num_bytes: int, huge_pages: bool
    ) -> None:
        base = ctypes.c_void_p()
        config = abi.PoolConfig(
            size=ctypes.sizeof(abi.PoolConfig), huge=huge_pages, numa_node=-1, bytes=num_bytes
        )
        code = lib.ckv_pool_map(handle, ctypes.byref(config), ctypes.byref(base))
        if code != 0 or not base.value:
            raise TransferError(f"no host pool: {lib.ckv_last_error().decode()}.")
        self._lib = lib
        self._handle = handle
        self.num_bytes = num_bytes
        self.base: int = base.value

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
        code = self._lib.ckv_pool_unmap(self._handle, ctypes.c_void_p(self.base))
        if code != 0:
            raise TransferError(f"the host pool stays: {self._lib.ckv_last_error().decode()}.")
        self.base = 0
