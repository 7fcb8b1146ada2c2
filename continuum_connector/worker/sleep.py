"""Sleep: the time from when vLLM takes a rank's KV cache away until it is back.

    awake -> drained (no copy is under way, none begins) -> asleep -> moved -> awake

vLLM unmaps VRAM and may map it elsewhere; a copy still under way would then overwrite something
else. DRAM stays as it is, or all of it goes to whoever shares the machine (`sleep_dram`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import TransferError
from continuum_connector.messages import LoadOrder, ReadOrder, StoreOrder, WriteOrder
from continuum_connector.worker.engine import CopyEngine
from continuum_connector.worker.layout import Layout

logger = logging.getLogger(f"vllm.{__name__}")

DRAIN_S = 2.0  # for what is cancelled: what the driver has already, which takes milliseconds


class Sleep:
    """Of one rank; the worker asks `is_on` before it gives anybody an order."""

    def __init__(self, gives_back: bool, clock: Callable[[], float]) -> None:
        self.is_on = False
        self._gives_back = gives_back
        self._clock = clock
        self._is_released = False
        # By slot, since DRAM was given back: whether something has been put there. An epoch that a
        # client named and goes back to may be older than the sleep, and its slots are empty now.
        self._filled: npt.NDArray[np.bool_] | None = None

    def wait(self, engine: CopyEngine, tags: Collection[int]) -> set[int]:
        """BLOCK until these are over, DRAIN_S at most; those that are not."""
        deadline = self._clock() + DRAIN_S
        return {tag for tag in tags if not engine.wait(tag, max(0.0, deadline - self._clock()))}

    def give_back(self, engine: CopyEngine) -> bool:
        """BLOCK until the system has the pool's memory, if it is to; whether it has."""
        if not self._gives_back or self._is_released:
            return False
        try:
            engine.pool.release()
        except TransferError as error:
            logger.warning("DRAM stays taken while vLLM sleeps: %s", error)
            return False
        self._is_released = True
        return True

    def end(self, engine: CopyEngine, layout: Layout, num_slots: int) -> bool:
        """Blocks lie where `layout` says. Whether the pool begins anew, with nothing ready."""
        engine.pool.set_regions(layout, num_slots)
        if not self._is_released:
            return False
        engine.pool.regrow()
        self._is_released = False
        self._filled = np.zeros(num_slots, np.bool_)
        return True

    def is_lost(self, order: LoadOrder | StoreOrder | ReadOrder | WriteOrder) -> bool:
        """Whether the order wants what was in DRAM before that was given back."""
        if self._filled is None or isinstance(order, StoreOrder | ReadOrder):
            return False
        return not self._filled[order.slots].all()

    def settled(
        self, order: LoadOrder | StoreOrder | ReadOrder | WriteOrder, is_done: bool
    ) -> None:
        """It has ended; what a store or a read was to put into its slots is there or is not."""
        if self._filled is not None and isinstance(order, StoreOrder | ReadOrder):
            self._filled[order.slots[order.slots >= 0]] = is_done
