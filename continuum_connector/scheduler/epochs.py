"""Epochs: KV belongs to the weights that computed it; when they change, a new epoch begins.

vLLM's block hashes do not cover the weights, so we must then forget all blocks found by hash. Those
below VRAM are forgotten at once. VRAM's own prefix cache is vLLM's. If nobody empties it, turns
continue with KV of the old weights; we only make sure that none of that KV is kept for later,
neither by a pin nor in DRAM. If vLLM refuses a reset because turns run, we empty the prefix cache
except for the blocks of those turns (resets.py).

AdapterNames: when a LoRA adapter's name comes to mean another adapter, which begins an epoch, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from continuum_connector.scheduler.pins import Retention
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.stock import UnknownStock
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import PinEnd


class Cause(enum.Enum):
    RESET = "reset"  # vLLM was asked to empty its prefix cache
    WEIGHTS = "weights"  # a worker saw its weights change
    VERSION = "version"  # vLLM was told another weight version


class Epochs:
    """Begins epochs, and knows of which epoch a turn's KV may be.

    `number` grows with each epoch. `is_resetting`: an epoch has begun for a reset that still runs,
    so no other epoch may begin for it. `is_vram_empty` says whether no turn has KV and no lookup
    finds any.

    `found_older` is None unless turns run on with older KV beside a prefix cache that was emptied
    of all else (resets.py, OlderTurns). Then every block that VRAM's prefix cache has is of this
    epoch, apart from those that these turns still add. Given the id of a request that has just got
    its blocks, `found_older` says whether some of them are such blocks.
    """

    def __init__(
        self,
        retention: Retention,
        tier: Tier,
        records: Records,
        stock: UnknownStock,
        is_vram_empty: Callable[[], bool],
    ) -> None:
        self.number = 0
        self.is_resetting = False
        self._is_vram_empty = is_vram_empty
        self._on_begin: Callable[[], None] = lambda: None
        self.found_older: Callable[[str], bool] | None = None
        self._vram_since = 0  # VRAM's prefix cache holds nothing older than this epoch
        self._retention = retention
        self._tier, traffic = tier, tier.traffic
        self._ledger = traffic.ledger
        self._records, self._account, self._stock = records, records.account, stock

    def begin(self, cause: Cause, now: float, why: str = "") -> None:
        """Begin a new epoch. KV computed until now is no longer kept, and no lookup below VRAM
        finds it, even if a copy settles late.

        `why`, for the trace: what we or a worker saw, or what a client calls the new weights.
        """
        self.number = self._ledger.begin_epoch()
        self.forget_all(PinEnd.RESET, now)
        self.found_older = None
        self._on_begin()
        if self._is_vram_empty():
            self.vram_emptied()
        self._account.gauge("epoch", self.number)
        self._account.count("epochs", label=cause.value)
        self._records.happened("epoch", now, epoch=self.number, cause=cause.value, why=why)

    def call_once_begun(self, call: Callable[[], None]) -> None:
        """Call this once we have forgotten all our blocks, because vLLM's scheduler may still have
        turns whose KV was loaded, or is being loaded, and has not been used yet."""
        self._on_begin = call

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """vLLM carries out the reset for which an epoch has begun."""
        self.is_resetting = True
        try:
            yield
        finally:
            self.is_resetting = False

    def follow_older(self, found: Callable[[str], bool] | None) -> None:
        """Turns run on with older KV, and `found` says who has found some; None: nobody says."""
        self.found_older = found

    def forget_all(self, cause: PinEnd, now: float) -> None:
        """End every pin with `cause`, and forget every block below VRAM (Tier.reset)."""
        self._retention.end_all(cause, now)
        self._stock.clear()
        for transfer in self._tier.reset():
            self._records.settled(transfer, now)

    def vram_emptied(self) -> None:
        """Neither VRAM's prefix cache nor any turn has KV of an older epoch."""
        self._vram_since = self.number
        self.found_older = None

    @property
    def is_vram_of_now(self) -> bool:
        return self._vram_since == self.number

    def of_kv(self, num_tokens: int) -> int:
        """The epoch of a turn that has `num_tokens` of KV, whichever turns computed them: an older
        epoch if some of that KV may be of it."""
        return self._vram_since if num_tokens else self.number

    def of_hit(self, num_vram_tokens: int) -> int:
        """The epoch of a turn that is about to get the `num_vram_tokens` found in VRAM."""
        return self.of_kv(num_vram_tokens) if self.found_older is None else self.number

    def of_blocks(self, epoch: int, request_id: str) -> int:
        """The epoch of a turn that has got its blocks; `epoch`: what `of_hit` said before."""
        if self.found_older is not None and self.found_older(request_id):
            return self._vram_since
        return epoch


_MAX_NAMES = 4096
_MAX_IDS = 64  # of a name; a trainer may number its steps, and API servers are a few


class AdapterNames:
    """What LoRA adapters' names mean: each one's path, and the ids that it had there. A name that
    comes to mean another adapter begins an epoch, so that no turn gets KV of the one before."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[str, set[int]]] = {}

    def arrived(self, request: Any) -> bool:
        """A turn has arrived, and nobody has looked for its KV yet. Return whether its adapter's
        name may have meant another adapter until now: it has another path, or an id that it never
        had there. vLLM's hashes have the name alone, from 0.32 on the path too.

        A second API server counts ids of its own, so an id that was there before is no news.
        """
        lora = request.lora_request
        if not lora:
            return False
        known = self._named.get(lora.name)
        is_full = known is None and len(self._named) >= _MAX_NAMES
        if is_full:  # safe: our answer begins an epoch, and KV of all these names is forgotten
            self._named.clear()
        path, ids = known or (lora.path, set())
        if path == lora.path and lora.adapter_id in ids:
            return False
        if path != lora.path or len(ids) >= _MAX_IDS:
            ids = set()
        self._named[lora.name] = lora.path, ids
        ids.add(lora.adapter_id)
        return is_full or known is not None
