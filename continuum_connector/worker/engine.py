"""CopyEngine: what the worker needs of a thing that copies blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from continuum_connector.messages import BlockIds

CONFLICT = -2  # Completion.error: an unfinished transfer uses a block or slot of it (CKV_EINVAL)
CORRUPT = -10  # Completion.error: a slot no longer holds what was stored in it (CKV_ECORRUPT)


class Direction(enum.Enum):
    LOAD = 0  # DRAM -> VRAM
    STORE = 1  # VRAM -> DRAM


class Status(enum.Enum):
    DONE = 1
    CANCELLED = 2
    FAILED = 3


@dataclass(frozen=True)
class Region:
    """One span that holds a piece of every block.

    Piece of VRAM block b: `dev_base + b * dev_stride`, `num_bytes` long. Piece of host
    slot s: `host_offset + s * slot_bytes` into the pool. All in bytes.
    """

    dev_base: int
    dev_stride: int
    host_offset: int
    num_bytes: int


@dataclass(frozen=True)
class Completion:
    """One submitted transfer that will not touch memory again, reported exactly once."""

    tag: int
    status: Status
    error: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PoolState:
    """How far a pool has come. `why` says what stopped it early, or is empty."""

    ready_bytes: int
    mapped_bytes: int
    is_growing: bool
    why: str
    numa_node: int
    populate_s: float
    lock_s: float


@dataclass(frozen=True)
class Health:
    """`poison`: what ended the engine for good, the driver's own code or a CKV_ code (below 0);
    0 while it can copy. `given_up`: ways of copying that failed and are not used any more."""

    poison: int = 0
    given_up: tuple[str, ...] = ()


class CopyEngine(Protocol):
    """Submits and polls in microseconds; only `wait`, `wait_pool` and `close` block.

    All methods are called from one thread; only the last, `close`, may come from another, where
    nothing is in flight. `submit` copies the id arrays (int32, contiguous, equal length) before it
    returns.
    """

    def pool_state(self) -> PoolState:
        """Say how far the host pool has come, and what stopped it. A few microseconds.

        Slots within `ready_bytes` may be used; it only ever grows.
        """
        ...

    def wait_pool(self, timeout_s: float) -> bool:
        """Block until the host pool grows no more. False: timeout."""
        ...

    def submit(
        self,
        direction: Direction,
        blocks: BlockIds,
        slots: BlockIds,
        tag: int,
        after_stream: int = 0,
        *,
        speculative: bool = False,
    ) -> None:
        """Queue a transfer; raises TransferError if the engine is closed or poisoned.

        `after_stream`: the CUDA stream whose queued work the copy waits for (store: compute
        done; load: block zeroing done). 0 is CUDA's default stream; a simulated engine,
        whose compute is done when it is called, has nothing to wait for then.
        `speculative`: a load that nobody waits for yet; loads that are waited for pass it.
        """
        ...

    def poll(self) -> list[Completion]:
        """Return what settled since the last poll, oldest first; [] costs well under 1 us."""
        ...

    def health(self) -> Health:
        """Say what has failed for good so far. A few microseconds; also of a poisoned engine."""
        ...

    def cancel(self, tag: int) -> None:
        """Ask to stop a transfer; it still completes, as CANCELLED unless it was faster."""
        ...

    def wait(self, tag: int, timeout_s: float) -> bool:
        """Block until `tag` has settled; its completion still comes by `poll`. False: timeout."""
        ...

    def close(self, timeout_s: float) -> None:
        """Drain or cancel what is in flight, stop the threads, unmap the pool. Idempotent."""
        ...
