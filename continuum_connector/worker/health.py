"""The copy engine's health and its end: EngineHealth says what has failed, Closer closes the
engine.

Closing ends the engine's threads, and unlocks and unmaps its pool. With a large pool that takes
seconds, so it runs on a thread of its own while the server still steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from continuum_connector.errors import TransferError
from continuum_connector.messages import TransferOutcome
from continuum_connector.worker.engine import (
    CONFLICT,
    CORRUPT,
    EIO,
    ENOSPC,
    INTERNAL,
    MISSING,
    Completion,
    CopyEngine,
    Status,
)

logger = logging.getLogger(f"vllm.{__name__}")

_CONSEQUENCE = "what leaves VRAM is computed again until the server is restarted"

LOOK_EVERY_S = 1.0

_REASONS = {Status.FAILED: "driver", Status.CANCELLED: "cancelled"}
_REASONS_OF_ERRORS = {CONFLICT: "refused", CORRUPT: "corrupt"}
_REASONS_OF_ERRORS |= {EIO: "eio", MISSING: "missing", ENOSPC: "enospc"}
_OF_ONE_SLOT = (EIO, CORRUPT, MISSING)  # what a disk slot has, not the whole disk


class EngineHealth:
    """The health of one rank's engine. A cause may fail every block of every transfer, so it is
    logged only once; the metrics say how often it came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.has_ended = False  # the engine no longer copies
        self._told: set[str] = set()
        self._clock = clock
        self._checked = float("-inf")

    def is_check_due(self) -> bool:
        """Whether to ask an engine now that completes nothing. That is once a second, because
        copies of a poisoned engine may never end."""
        return self._clock() - self._checked >= LOOK_EVERY_S

    def check(
        self, engine: CopyEngine, completions: Sequence[Completion] = (), refusal: str = ""
    ) -> str:
        """Ask for the engine's health, now that it completed or refused something.

        Returns, once, why it no longer copies: in the engine's words if it has refused, else by
        number.
        """
        if self.has_ended:
            return ""
        self._checked = self._clock()
        for completion in completions:
            if completion.status is Status.FAILED and completion.error != CORRUPT:
                self._tell(_name(completion.error), "A copy failed: %s")
        health = engine.health()
        for path in health.given_up:
            self._tell(path, "The driver fails at the %s path, so copies go another way from here")
        if health.poison:
            self.has_ended = True
            what = refusal.rstrip(".") or _name(health.poison)
            return f"the copy engine failed: {what}; {_CONSEQUENCE}"
        if refusal:
            self._tell(refusal.rstrip("."), "A copy was refused: %s", key="refused")
        return ""

    def _tell(self, what: str, sentence: str, key: str = "") -> None:
        if (key or what) not in self._told:
            self._told.add(key or what)
            logger.warning(sentence + ". This is said once", what)


def _name(error: int) -> str:
    """A completion's code in words. The driver's own codes are above 0."""
    if error == CONFLICT:
        return "an unfinished transfer uses a block or slot of it"
    if error == INTERNAL:
        return "a bug in the native library (error -9); please report it with this log"
    return f"CUDA error {error}" if error > 0 else f"error {error} of the native library"


def outcome_of(completion: Completion, reason: str) -> TransferOutcome:
    """One rank's result of a transfer. `reason`, if given, is why it may not have succeeded."""
    if completion.status is Status.DONE:
        return TransferOutcome(
            num_done=1, num_bytes=completion.num_bytes, seconds=completion.seconds
        )
    reason = _REASONS_OF_ERRORS.get(completion.error, reason) or _REASONS[completion.status]
    errors = completion.disk_errors
    if not errors:
        return failed_because(reason)
    bad = {_REASONS_OF_ERRORS[each]: _places(errors, each) for each in _OF_ONE_SLOT}
    return TransferOutcome(num_failed=1, reasons=(reason,), copied=_places(errors, 0), bad=bad)


def failed_because(reason: str) -> TransferOutcome:
    """One rank's result of a transfer that has failed here, with one word for why."""
    return TransferOutcome(num_failed=1, reasons=(reason,))


def _places(errors: Sequence[int], error: int) -> frozenset[int]:
    return frozenset(place for place, each in enumerate(errors) if each == error)


_TIMEOUT_S = 2.0  # for the copies that the driver already has: one window, which takes milliseconds


class Closer:
    """Closes one rank's engine. Nobody else may use an engine that is being closed, nor the disk
    that uses it: `end_disk` ends that first, and returns False while it is inside the engine."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._end_disk: Callable[[], bool] = lambda: True

    def end_first(self, end_disk: Callable[[], bool]) -> None:
        """End this disk before the engine that it uses."""
        self._end_disk = end_disk

    def close(self, engine: CopyEngine) -> None:
        """BLOCKS. Copies in flight get 2 s. An engine that does not close is logged and left as it
        is."""
        if not self._end_disk():
            return
        try:
            engine.close(_TIMEOUT_S)
        except TransferError as error:
            logger.warning("the copy engine did not close: %s", error)

    def close_behind(self, engine: CopyEngine) -> bool:
        """Close it on a thread. False: the system has no thread to give, for instance for lack of
        memory."""
        # Not a daemon: it would die inside the driver if the interpreter ended meanwhile.
        thread = threading.Thread(
            target=self.close, args=(engine,), name="continuum-close", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def join(self) -> None:
        """BLOCK until the engine that is being closed on a thread is closed."""
        if self._thread is not None:
            self._thread.join()
