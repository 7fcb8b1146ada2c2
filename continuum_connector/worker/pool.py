"""The DRAM that holds the slots: mapped and page-locked by the native library, and how it grows.

The pool grows on a native thread while the server serves. Python only watches it, and reports slots
to the scheduler and GiB to the log.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import TransferError
from continuum_connector.messages import BlockIds
from continuum_connector.worker import abi
from continuum_connector.worker.engine import CopyEngine, PoolState

if TYPE_CHECKING:
    from continuum_connector.worker.layout import Layout

_ETIMEOUT = -5  # CKV_TIMEOUT


class Stages(NamedTuple):
    """How a pool grows: `first_bytes` (0: all) at once, then `chunk_bytes` (0: 128 MiB) at a time.
    With `num_left` it does so only as `want` says, and while that leaves so many bytes to others
    for each of its own."""

    first_bytes: int = 0
    chunk_bytes: int = 0
    num_left: int = 0


class HostPool:
    """`num_bytes` of zeroed memory at address `base`; belongs to one native engine.

    Under CUDA the first bytes are populated and page-locked when this returns (seconds per 10 GiB)
    and the rest follows on a native thread; what cannot be had stays out of `ready_bytes`. Under
    the simulator pages are touched only by use, and all are ready unless it grows as `want` says.
    A fork does not inherit it. `numa` prefers memory next to the device.
    """

    def __init__(
        self,
        handle: ctypes.c_void_p,
        num_bytes: int,
        numa: bool = True,
        stages: Stages = Stages(),  # noqa: B008  # it cannot be changed
    ) -> None:
        self._blocking, self._quick = abi.load_library()
        base = ctypes.c_void_p()
        config = abi.PoolConfig(
            size=ctypes.sizeof(abi.PoolConfig),
            huge=True,
            numa_node=abi.NUMA_DEVICE if numa else abi.NUMA_ANY,
            bytes=num_bytes,
            chunk_bytes=stages.chunk_bytes,
            first_bytes=min(stages.first_bytes, num_bytes),
            wanted_bytes=min(stages.first_bytes, num_bytes) if stages.num_left else 0,
            num_left=stages.num_left,
        )
        code = self._blocking.ckv_pool_map(handle, ctypes.byref(config), ctypes.byref(base))
        if code != 0 or not base.value:
            raise TransferError(f"no host pool: {self._quick.ckv_last_error().decode()}.")
        self._handle = handle
        self.num_bytes = num_bytes
        self.base: int = base.value

    def state(self) -> PoolState:
        """How far the pool has grown. Costs microseconds."""
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
            wanted_bytes=raw.wanted_bytes,
        )

    def want(self, num_bytes: int) -> None:
        """Have it grow to so many bytes, if it wanted less. Costs microseconds."""
        self._check(
            self._quick.ckv_pool_want(self._handle, self.base, num_bytes), "the pool does not grow"
        )

    def wait(self, timeout_s: float) -> bool:
        """Block, without the GIL, until the pool stops growing. False: it still grows."""
        code = self._blocking.ckv_pool_wait(self._handle, self.base, int(timeout_s * 1e6))
        if code not in (0, _ETIMEOUT):
            raise TransferError(f"no pool to wait for: {self._quick.ckv_last_error().decode()}.")
        return bool(code == 0)

    def set_regions(self, layout: Layout, num_slots: int) -> None:
        """Say where the blocks lie whose slots are here. To be called again after they were moved,
        which is refused while a copy is under way."""
        size = layout.slot_bytes
        array = (abi.RawRegion * len(layout.regions))(
            *(
                abi.RawRegion(
                    r.dev_base, r.dev_stride, self.base + r.host_offset, size, r.num_bytes
                )
                for r in layout.regions
            )
        )
        self._check(
            self._blocking.ckv_set_regions(
                self._handle, array, len(array), layout.num_blocks, num_slots
            ),
            "regions are not set",
        )

    def release(self) -> None:
        """BLOCK, without the GIL, until the system has all pages back. Their content is lost.
        Refused while a copy is under way."""
        code = self._blocking.ckv_pool_release(self._handle, ctypes.c_void_p(self.base))
        self._check(code, "the host pool keeps its pages")

    def regrow(self) -> None:
        """Have a pool that was released grow again, all of it on the native thread."""
        code = self._blocking.ckv_pool_regrow(self._handle, ctypes.c_void_p(self.base))
        self._check(code, "the host pool does not grow again")

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            raise TransferError(f"{what}: {self._quick.ckv_last_error().decode()}.")

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


logger = logging.getLogger(f"vllm.{__name__}")

_LOOK_EVERY = 256  # calls, once memory was short, when the native thread tries twice a minute


class Demand:
    """How much of a pool that grows by use is wanted: twice what has ever been used, and
    `first_bytes` more, so that there is room before it is needed."""

    def __init__(self, engine: CopyEngine, num_slots: int, slot_bytes: int, first: int) -> None:
        self._pool = engine.pool
        self._slot_bytes = slot_bytes
        self._first_bytes = first
        self._is_used = np.zeros(num_slots, np.bool_)
        self._num_used = 0

    def use(self, slots: BlockIds) -> bool:
        """A copy fills these slots; -1 stands for none. Return whether the pool may grow for it."""
        slots = slots[slots >= 0]
        num_new = int(np.count_nonzero(~self._is_used[slots]))
        if num_new == 0:
            return False
        self._is_used[slots] = True
        self._num_used += num_new
        self._pool.want(2 * self._num_used * self._slot_bytes + self._first_bytes)
        return True


class PoolGrowth:
    """Follows one engine's pool until it has its full size.

    `num_ready` slots are usable. A pool that stops before `num_slots` stays smaller for now: the
    log says so, and we follow it further, because it tries again. If it has no slot at all,
    `why_no_tier` is a sentence with both sizes and the cause.
    """

    def __init__(
        self,
        engine: CopyEngine,
        num_slots: int,
        slot_bytes: int,
        is_again: bool = False,
        demand: Demand | None = None,
    ) -> None:
        """`is_again`: the pool was released, and may get nothing as long as others use the memory.
        `demand`: it grows by use."""
        self.num_ready = 0
        self.is_over = False
        self.why_no_tier = ""
        self._engine = engine
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self.is_again = is_again
        self._demand = demand
        self._waits = False  # for more demand
        self._num_quarters = 0
        self._is_short = False
        self._num_calls = 0

    def start(self) -> None:
        """Take the first look."""
        self.advance()
        if not self.is_over:
            when = " as blocks need it" if self._waits else ""
            logger.info("serving with %s of DRAM, the rest follows%s", self._progress(), when)

    def used(self, slots: BlockIds) -> None:
        """A copy fills these slots."""
        if self._demand is not None and self._demand.use(slots):
            self._waits = False

    def advance(self) -> bool:
        """Look again: a few microseconds. True if more slots are usable than before."""
        self._num_calls += 1
        if self._waits or (self._is_short and self._num_calls % _LOOK_EVERY):
            return False
        state = self._engine.pool_state()
        num_ready = min(self._num_slots, state.ready_bytes // self._slot_bytes)
        before, self.num_ready = self.num_ready, num_ready
        num_quarters = 4 * self.num_ready // self._num_slots
        self._waits = state.wanted_bytes <= state.ready_bytes and num_ready < self._num_slots
        if self._waits:
            self._is_short = False
        elif not state.is_growing and (num_ready == self._num_slots or not self._is_short):
            self._end(state)
        elif num_quarters > self._num_quarters:
            logger.info("%s of DRAM are ready", self._progress())
        self._num_quarters = num_quarters
        return self.num_ready > before

    def _end(self, state: PoolState) -> None:
        if self.num_ready < self._num_slots:
            self._end_short(state.why.rstrip("."))
            return
        self.is_over = True
        where = f" on NUMA node {state.numa_node}" if state.numa_node >= 0 else ""
        logger.info(
            "%s of DRAM are ready%s: %.1f s to populate, %.1f s to page-lock",
            self._progress(),
            where,
            state.populate_s,
            state.lock_s,
        )

    def _end_short(self, why: str) -> None:
        why = why or "the pool stopped growing and did not say why"
        shortage = f"only {self._progress()} of DRAM could be had: {why}"
        if self.num_ready == 0 and not self.is_again:
            self.why_no_tier = f"{shortage}. Not one block fits, so nothing is offloaded"
        else:
            self._is_short = True
            logger.warning("The DRAM tier is smaller for now: %s", shortage)
        self.is_over = not self._is_short

    def _progress(self) -> str:
        """How much of the requested memory is usable, such as "1.0 of 64.0 GiB"."""
        ready, wanted = (n * self._slot_bytes for n in (self.num_ready, self._num_slots))
        unit, name = (2**30, "GiB") if wanted >= 2**30 else (2**20, "MiB")
        return f"{ready / unit:.1f} of {wanted / unit:.1f} {name}"
