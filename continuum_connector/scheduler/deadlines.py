"""Deadlines: which transfers take too long. They are cancelled; one that does not end even then
hangs: the driver has its copies and does not give them back."""

from __future__ import annotations

from collections import deque

from continuum_connector.scheduler.transfers import Transfer, TransferLedger

# What a cancel cannot take back is a trunk or two that are being copied: milliseconds.
HANGS_AFTER_S = 60.0
_MIN_STEPS = 10  # that the workers had meanwhile to say that it has ended


class Deadlines:
    """Of the transfers in one ledger, each `timeout_s` after it was admitted."""

    def __init__(self, ledger: TransferLedger, timeout_s: float) -> None:
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._by_age: deque[Transfer] = deque()
        self._cancelled: deque[tuple[Transfer, float, int]] = deque()  # when, in which step
        self._num_steps = 0

    def add(self, transfer: Transfer) -> None:
        """Watch one that has just been admitted."""
        self._by_age.append(transfer)

    def step(self, now: float) -> Transfer | None:
        """Once a step: cancel what is late; return one that hangs, each once."""
        self._num_steps += 1
        while self._by_age and self._is_over(self._by_age[0], now):
            transfer = self._by_age.popleft()
            if transfer.id in self._ledger:
                self._ledger.cancel(transfer)
                self._cancelled.append((transfer, now, self._num_steps))
        while self._cancelled:
            transfer, since, step = self._cancelled[0]
            hangs = now - since >= HANGS_AFTER_S and self._num_steps - step >= _MIN_STEPS
            if transfer.id in self._ledger and not hangs:
                return None
            self._cancelled.popleft()
            if transfer.id in self._ledger:
                return transfer
        return None

    def _is_over(self, transfer: Transfer, now: float) -> bool:
        return transfer.id not in self._ledger or now - transfer.admitted > self._timeout_s
