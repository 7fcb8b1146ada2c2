"""Account: adds up what happened, for the metrics of metric_table.py.

Needs no vLLM: the scheduler half and the worker half each own one Account, and
metrics.py carries what `take` returns to Prometheus.

Timed: how long each of vLLM's hooks takes us, for `continuum:hook_seconds`.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from continuum_connector.errors import InvariantError
from continuum_connector.observe.metric_table import OTHER, WIRE_KEYS, Kind

Payload = dict[str, dict[str, Any]]
Scope = Callable[[str], AbstractContextManager[Any]]
Key = tuple[str, str | None]


class _Histogram:
    """Counts and sums per bucket. They merge exactly and do not grow with the observations."""

    __slots__ = ("bounds", "num_taken", "numbers", "sums", "sums_taken", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = self.num_taken = 0
        self.sums_taken = 0.0
        self._empty()

    def _empty(self) -> None:
        self.numbers = [0] * (len(self.bounds) + 1)
        self.sums = [0.0] * (len(self.bounds) + 1)

    def drain(self) -> list[list[Any]]:
        """[bucket, observations, their sum] of each that has some since this was last called."""
        cells = [[i, n, self.sums[i]] for i, n in enumerate(self.numbers) if n]
        self.num_taken = self.total
        self.sums_taken += sum(self.sums)
        self._empty()
        return cells


class Account:
    """Adds up what happened, in well under a microsecond per call, from one thread.

    A name or label outside METRICS raises InvariantError, unless the metric has the label `other`.
    Nothing grows if nobody calls `take`. `scope`: opens a profiler's range of a name around each
    hook that is timed; None: nobody profiles.
    """

    def __init__(self, scope: Scope | None = None) -> None:
        self.scope = scope
        self._text: dict[Key, str] = {(k.metric.name, k.label): t for t, k in WIRE_KEYS.items()}
        kinds = {(k.metric.name, k.label): k.metric for k in WIRE_KEYS.values()}
        self._counts = {k: 0 for k, m in kinds.items() if m.kind is Kind.COUNTER}
        self._taken = dict(self._counts)
        gauges = {k: m.first for k, m in kinds.items() if m.kind is Kind.GAUGE}
        self._gauges: dict[Key, float] = gauges
        self._histograms = {
            k: _Histogram(m.buckets) for k, m in kinds.items() if m.kind is Kind.HISTOGRAM
        }
        self._moved: set[Key] = set()

    def count(self, name: str, n: int = 1, label: str | None = None) -> None:
        """Add `n`, which is never negative, to a counter."""
        key = (name, label)
        if key not in self._counts:
            key = self._other(key, self._counts)
        self._counts[key] += n

    def gauge(self, name: str, value: float, label: str | None = None) -> None:
        """Set a gauge; it is sent only if it differs from what it was."""
        key = (name, label)
        if key not in self._gauges:
            key = self._other(key, self._gauges)
        if self._gauges[key] != value:
            self._gauges[key] = value
            self._moved.add(key)

    def observe(self, name: str, value: float, label: str | None = None) -> None:
        """Add one value to a histogram."""
        key = (name, label)
        if key not in self._histograms:
            key = self._other(key, self._histograms)
        histogram = self._histograms[key]
        histogram.total += 1
        index = bisect_left(histogram.bounds, value)
        histogram.numbers[index] += 1
        histogram.sums[index] += value

    def total(self, name: str, label: str | None = None) -> float:
        """Return a counter's or a gauge's value, or a histogram's number of observations.

        Without a label, the sum over all labels.
        """
        seen = {key: each.total for key, each in self._histograms.items()}
        known = {**self._counts, **self._gauges, **seen}.items()
        found = [n for (of, its), n in known if of == name and label in (None, its)]
        if not found:
            raise InvariantError(f"metric {name!r} with label {label!r} is not in METRICS")
        return sum(found)

    def sum_of(self, name: str) -> float:
        """Return the sum of all that a histogram has seen, over all labels, whoever took it."""
        seen = [each for (of, _), each in self._histograms.items() if of == name]
        return sum(each.sums_taken + sum(each.sums) for each in seen)

    def take(self) -> Payload | None:
        """Return what changed since the last take, or None, in a form that can cross processes.

        Counters and observations are increments, gauges are absolute values.
        """
        payload: Payload = {}
        counts, taken = self._counts, self._taken
        # Once a second over all counters costs less than noting each change when it happens.
        grown = [key for key, n in counts.items() if n != taken[key]]
        if grown:
            payload["counters"] = {self._text[k]: counts[k] - taken[k] for k in grown}
            self._taken = dict(counts)
        if self._moved:
            payload["gauges"] = {self._text[k]: self._gauges[k] for k in self._moved}
            self._moved.clear()
        seen = [
            (key, each) for key, each in self._histograms.items() if each.total > each.num_taken
        ]
        if seen:
            payload["histograms"] = {self._text[key]: each.drain() for key, each in seen}
        return payload or None

    @staticmethod
    def _other(key: Key, known: dict[Key, Any]) -> Key:
        """The key that counts an unforeseen label."""
        if key[1] is not None and (key[0], OTHER) in known:
            return (key[0], OTHER)
        raise InvariantError(f"metric {key[0]!r} with label {key[1]!r} is not in METRICS")


def merge(first: Payload, second: Payload) -> Payload:
    """Return both payloads as one: sums, and the second's value of each gauge.

    Neither argument is changed: loggers of one process share them.
    """
    counters = dict(first.get("counters", {}))
    for key, n in second.get("counters", {}).items():
        counters[key] = counters.get(key, 0) + n
    histograms = dict(first.get("histograms", {}))
    for key, cells in second.get("histograms", {}).items():
        summed = {index: [n, total] for index, n, total in histograms.get(key, ())}
        for index, n, total in cells:
            cell = summed.setdefault(index, [0, 0.0])
            cell[0] += n
            cell[1] += total
        histograms[key] = [[index, *cell] for index, cell in summed.items()]
    gauges = first.get("gauges", {}) | second.get("gauges", {})
    payload = {"counters": counters, "gauges": gauges, "histograms": histograms}
    return {part: values for part, values in payload.items() if values}


Hook = TypeVar("Hook", bound=Callable[..., Any])


def timed(label: str) -> Callable[[Hook], Hook]:
    """Count the seconds spent in a hook, for `continuum:hook_seconds`."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                if self.account.scope is None:
                    return hook(self, *args, **kwargs)
                with self.account.scope(f"continuum: {label}"):
                    return hook(self, *args, **kwargs)
            finally:
                self.account.observe("hook_seconds", time.perf_counter() - began, label)

        return cast(Hook, measured)

    return wrap
