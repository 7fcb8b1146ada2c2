"""How far a run is and when it will end: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import math

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
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=math.inf,  # since the first news: what comes before is setting up
        )
        self._bar.add_task(label, total=total or None, state="")
        (self._task,) = self._bar.tasks

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """What is going on now."""
        self._bar.update(self._task.id, state=text)
        if self._bar.disable:
            self._line(text)

    def update(self, done: float, text: str) -> None:
        """So much is done; `text`: of what."""
        self._bar.update(self._task.id, completed=done)
        text = f"{text}, {span(self._task.elapsed or 0.0)} so far"
        if (left := self._task.time_remaining) is not None:
            text += f", {span(left)} left"
        self._bar.update(self._task.id, state=text)
        if self._bar.disable and (part := int(done / self._part + 1e-9)) > self._parts:
            self._parts = part
            self._line(f"{100 * done / self._total:3.0f} %  {text}" if self._total else text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def span(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
