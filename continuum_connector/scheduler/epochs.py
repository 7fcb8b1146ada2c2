"""Epochs: KV belongs to the weights that computed it; when they change, a new epoch begins.

vLLM's block hashes do not cover the weights, so whatever is found by hash must be forgotten then.
What lies below VRAM is, at once. VRAM's own prefix cache is vLLM's: where nobody empties it, turns
go on with KV of before, and all that we owe is that nothing of that is kept for later: no pin, and
nothing in DRAM. A reset that vLLM refuses, because turns run, empties it but for those (resets.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.tiers.base import Tier


class Cause(enum.Enum):
    RESET = "reset"  # vLLM was asked to empty its prefix cache
    WEIGHTS = "weights"  # a worker saw its weights change
    VERSION = "version"  # vLLM was told another weight version


class Epochs:
    """`number` grows with each. `on_begin` is told of one once all of ours is forgotten: vLLM's
    scheduler has turns whose KV was loaded, or is being loaded, and not used yet. `is_resetting`:
    one has begun for a reset that goes on, and no other is to begin for it. `is_vram_empty`: no
    turn has KV, and none is to be found. `is_of_before`: None, or VRAM's prefix cache has nothing
    older than this epoch but what turns still add that ran when it began, and this says whether the
    request of that id, which has just got its blocks, found some of theirs."""

    def __init__(self, retention: Retention, tier: Tier, records: Records) -> None:
        self.number = 0
        self.name = ""  # that a client gave these weights
        self.is_resetting = False
        self.is_vram_empty: Callable[[], bool] = lambda: False
        self.on_begin: Callable[[], None] = lambda: None
        self.is_of_before: Callable[[str], bool] | None = None
        self._vram_since = 0  # VRAM's prefix cache holds nothing older
        self._retention = retention
        self._tier, traffic = tier, tier.traffic
        self._ledger = traffic.ledger
        self._records, self._account = records, records.account

    def begin(self, cause: Cause, now: float, why: str = "", name: str = "") -> None:
        """A new one. What was computed until now is not kept any longer, nor is it found below
        VRAM, also not by a copy that settles late. `why`: what a worker saw. Weights
        that changed by themselves are no longer those of the last epoch's name: nobody goes back to
        what it had; nor does anybody to weights without a name."""
        self.number = self._ledger.begin_epoch()
        keep_as = "" if cause is Cause.WEIGHTS else self.name
        self.name = name
        self.let_go(PinEnd.RESET, now, keep_as, name)
        self.is_of_before = None
        self.on_begin()
        if self.is_vram_empty():
            self.vram_emptied()
        self._account.gauge("epoch", self.number)
        self._account.count("epochs", label=cause.value)
        self._records.happened("epoch", now, epoch=self.number, cause=cause.value, why=why or name)

    def let_go(self, cause: PinEnd, now: float, keep_as: str = "", name: str = "") -> None:
        """End every pin for that cause, and forget every block below VRAM (Tier.reset)."""
        self._retention.end_all(cause, now)
        for transfer in self._tier.reset(now, keep_as, name):
            self._records.settled(transfer, now)

    def vram_emptied(self) -> None:
        """VRAM's prefix cache has nothing of before, nor has any turn."""
        self._vram_since = self.number
        self.is_of_before = None

    @property
    def is_vram_of_now(self) -> bool:
        return self._vram_since == self.number

    def of_kv(self, num_tokens: int) -> int:
        """The epoch of a turn that has so many tokens of KV, from whomever: an older one, if these
        may be of it."""
        return self._vram_since if num_tokens else self.number

    def of_hit(self, num_vram_tokens: int) -> int:
        """The same of one that is about to get what was found in VRAM."""
        return self.of_kv(num_vram_tokens) if self.is_of_before is None else self.number

    def of_blocks(self, epoch: int, request_id: str) -> int:
        """The same once it has got its blocks; `epoch`: what it was taken for."""
        if self.is_of_before is not None and self.is_of_before(request_id):
            return self._vram_since
        return epoch
