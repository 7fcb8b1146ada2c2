"""The copy engine's health and its end: EngineHealth says what has failed, Closer closes it.

Closing ends the engine's threads, and unlocks and unmaps its pool. With a large pool that takes
seconds, so while the server still steps, it runs on its own thread.
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


class EngineHealth:
    """Of one rank's engine. What fails once may fail for every block of every transfer, so each
    cause is told once; how often it came, the metrics say."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.has_ended = False  # it copies no more
        self._told: set[str] = set()
        self._clock = clock
        self._looked = float("-inf")

    def is_look_due(self) -> bool:
        """Whether an engine that completes nothing is to be asked now: once a second, for one that
        is poisoned may have copies that do not end."""
        return self._clock() - self._looked >= LOOK_EVERY_S

    def look(
        self, engine: CopyEngine, completions: Sequence[Completion] = (), refusal: str = ""
    ) -> str:
        """Ask the engine how it is, now that it completed or refused something.

        Returns, once, why it copies no more: in its own words if it has refused, else by number.
        """
        if self.has_ended:
            return ""
        self._looked = self._clock()
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
    """A completion's code in words: the driver's own are above 0."""
    if error == CONFLICT:
        return "an unfinished transfer uses a block or slot of it"
    return f"CUDA error {error}" if error > 0 else f"error {error} of the native library"


def outcome_of(completion: Completion, reason: str) -> TransferOutcome:
    """One rank's result of a transfer; `reason`, if given, is why it may not be done."""
    if completion.status is Status.DONE:
        return TransferOutcome(
            num_done=1, num_bytes=completion.num_bytes, seconds=completion.seconds
        )
    reason = _REASONS_OF_ERRORS.get(completion.error, reason) or _REASONS[completion.status]
    return TransferOutcome(num_failed=1, reasons=(reason,))


_TIMEOUT_S = 2.0  # for copies that the driver has: a window of them, which takes milliseconds


class Closer:
    """Of one rank's engine. Nobody else may use an engine that is closed behind, nor the disk that
    lives off it; `end_disk` ends that one first, and says no while it is inside the engine."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.end_disk: Callable[[], bool] = lambda: True

    def close(self, engine: CopyEngine) -> None:
        """BLOCKS. Copies in flight get 2 s; an engine that does not close is left, and logged."""
        if not self.end_disk():
            return
        try:
            engine.close(_TIMEOUT_S)
        except TransferError as error:
            logger.warning("the copy engine did not close: %s", error)

    def close_behind(self, engine: CopyEngine) -> bool:
        """Do so on a thread. False: the system has none to give, as while memory is short."""
        # Not a daemon, which would die inside the driver if the interpreter ended meanwhile.
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
        """BLOCK until what is closed behind is closed."""
        if self._thread is not None:
            self._thread.join()
