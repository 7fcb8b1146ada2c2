"""A progress bar on a terminal; a few plain lines in a log file."""

from __future__ import annotations

import time

from rich import progress as bars
from rich.console import Console


class Progress:
    """Turns done, of how many (0: not known). Off a terminal a line every quarter of the way."""

    def __init__(self, console: Console, label: str, num_turns: int) -> None:
        self._console = console
        self._label = label
        self._num_turns = num_turns
        self._done = 0
        self._failed = 0
        self._began = time.monotonic()
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TextColumn("{task.fields[state]}"),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._num_turns or None, state="")
        return self

    def __exit__(self, *ended: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, state: str) -> None:
        """What is going on now."""
        if self._bar:
            self._bar.update(self._task, state=state)
        else:
            self._line(state)

    def turn(self, failed: bool) -> None:
        """One more turn ended."""
        quarter = self._num_turns / 4 or 500
        self._done += 1
        self._failed += failed
        if self._bar:
            state = f"{self._failed} failed" if self._failed else "agents at work"
            self._bar.update(self._task, completed=self._done, state=state)
        elif self._done // quarter > (self._done - 1) // quarter:
            of = f" of {self._num_turns}" if self._num_turns else ""
            self._line(f"{self._done}{of} turns, {self._failed} failed")

    def _line(self, text: str) -> None:
        elapsed = time.monotonic() - self._began
        self._console.print(f"  {elapsed:4.0f} s  {text}", markup=False)
