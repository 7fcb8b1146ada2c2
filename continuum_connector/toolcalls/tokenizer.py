"""BackgroundTokenizer: the server's tokenizer, loaded by a thread when somebody needs it.

Loading takes seconds and hundreds of MB, so it happens once and nobody waits for it. Until it is
loaded, and for ever if it cannot be, `get` answers None and its users do without.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")


class BackgroundTokenizer:
    """Owns the tokenizer and the thread that loads it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        """`load` returns the tokenizer, or None where the server runs without one."""
        self._load = load
        self._prepare: list[Callable[[Any], None]] = []
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None

    def when_loaded(self, prepare: Callable[[Any], None]) -> None:
        """Let `prepare(tokenizer)` run in the background before `get` hands it out.

        Call it before `start`.
        """
        self._prepare.append(prepare)

    def start(self) -> None:
        """Begin to load it, once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="continuum-tokenizer", daemon=True
            )
            self._thread.start()

    def get(self) -> Any:
        """The tokenizer, or None: not asked for, not yet there, or never."""
        return self._tokenizer

    def join(self) -> None:
        """Wait for the thread; for those who have the time."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            tokenizer = self._load()
            if tokenizer is not None:
                for prepare in self._prepare:
                    prepare(tokenizer)
            self._tokenizer = tokenizer
        except Exception as error:
            logger.warning(
                "ContinuumConnector cannot load the tokenizer (%s), so tool calls stay unread "
                "and a client that disconnects looks like a stop string: such turns are kept "
                "until their TTL; let --tokenizer name one that this process can read, or "
                "declare `tools` in each request",
                error,
            )
