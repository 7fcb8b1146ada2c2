"""How far a run is and when it will end: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time

from rich import progress as bars
from rich.console import Console

PARTS = 10  # lines of a whole run off a terminal
UNKNOWN_PART = 500  # done by the next line, where nobody knows how much there is


class Progress:
    """What is done of `total` (0: not known), in the caller's own unit."""

    def __init__(self, console: Console, label: str, total: float = 0.0) -> None:
        self._console = console
        self._total = total
        self._part = total / PARTS or UNKNOWN_PART
        self._parts = 0
        self._began = time.monotonic()
        self._first: tuple[float, float] | None = None  # when news came first, what was done then
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=total or None, state="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """What is going on now."""
        self._bar.update(self._task, state=text)
        if self._bar.disable:
            self._line(text)

    def update(self, done: float, text: str) -> None:
        """So much is done; `text`: of what."""
        left = self._left(done)
        text = f"{text}, {span(time.monotonic() - self._began)} so far"
        text = text if left is None else f"{text}, {span(left)} left"
        self._bar.update(self._task, completed=done, state=text)
        if self._bar.disable and (part := int(done / self._part + 1e-9)) > self._parts:
            self._parts = part
            self._line(f"{100 * done / self._total:3.0f} %  {text}" if self._total else text)

    def _left(self, done: float) -> float | None:
        """Seconds left, by the pace since the first news: what comes before is setting up."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        began, before = self._first
        if done <= before or not self._total:
            return None
        return (now - began) * (self._total - done) / (done - before)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def span(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
