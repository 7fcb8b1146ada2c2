"""Closer: closes a copy engine, also where no step waits for it.

Closing ends the engine's threads, unlocks and unmaps its pool: seconds, where that is large.
"""

from __future__ import annotations

import logging
import threading

from continuum_connector.errors import TransferError
from continuum_connector.worker.engine import CopyEngine

logger = logging.getLogger(f"vllm.{__name__}")

_TIMEOUT_S = 2.0  # for copies that the driver has: a window of them, which takes milliseconds


class Closer:
    """Of one rank's engine. Nobody else may use an engine that is closed behind."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def close(self, engine: CopyEngine) -> None:
        """BLOCKS. Copies in flight get 2 s; an engine that does not close is left, and logged."""
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
