"""Which section is being measured: one live line on a terminal, plain lines in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status


class Progress:
    """Says what is measured now, with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._status: Status | None = None

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:5.0f} s  {text}"
        if not self._console.is_terminal:
            self._console.print(line, markup=False)
        elif self._status is None:
            self._status = self._console.status(line)
            self._status.start()
        else:
            self._status.update(line)

    def end(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None
