"""How far a run is and when it will end: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich import progress as bars
from rich.console import Console

from bench.sim.job import Job
from bench.sim.pool import ToldError

PARTS = 10  # lines of a whole run off a terminal


class Meter:
    """Follows jobs by their weight: those that take long count for more."""

    def __init__(self, console: Console, jobs: Iterable[Job]) -> None:
        self._console = console
        self._weights = {job.key: job.weight for job in jobs}
        self._shares = dict.fromkeys(self._weights, 0.0)
        self._total = sum(self._weights.values())
        self._ended = self._failed = self._parts = 0
        self._began = time.monotonic()
        self._first: tuple[float, float] | None = None  # when news came first, what was done then
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    def __enter__(self) -> Meter:
        if self._console.is_terminal:
            columns = (
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.TaskProgressColumn(),
                bars.TextColumn("{task.fields[state]}"),
            )
            self._bar = bars.Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("simulating", total=self._total, state="vLLM starts")
        return self

    def __exit__(self, *ended: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, told: ToldError) -> None:
        """News of a job came."""
        self._shares[told.job.key] = told.share
        if told.result is not None:
            self._ended += 1
            if told.result.error:
                self._failed += 1
                self._console.print(
                    f"failed: {told.job}: {told.result.error}", markup=False, highlight=False
                )
        done = sum(self._weights[key] * share for key, share in self._shares.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, state=self._state(done))
        elif (part := int(PARTS * done / self._total + 1e-9)) > self._parts:
            self._parts = part
            self._console.print(f"{100 * done / self._total:3.0f} %  {self._state(done)}")

    def _state(self, done: float) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        elapsed = time.monotonic() - self._began
        state = f"{self._ended} of {len(self._weights)} runs{failed}, {span(elapsed)} so far"
        left = self._left(done)
        return state if left is None else f"{state}, {span(left)} left"

    def _left(self, done: float) -> float | None:
        """Seconds left, by the pace since the first news: before it, vLLM was imported."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        began, before = self._first
        return (now - began) * (self._total - done) / (done - before) if done > before else None


def span(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
