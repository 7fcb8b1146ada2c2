"""Recorded gaps themselves, for the one rule that needs samples: Continuum, Equation 2."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from continuum_connector.costs.state_file import Bites
from continuum_connector.forecast.forecast import EDGES
from continuum_connector.forecast.tool_times import touch_and_evict

MAX_RECORDS = 1000  # of a tool, the most recent: ten times what the paper asks for (its K = 100)
MAX_TOOLS = 256
# Gaps of a tool that outlive a restart: more than K = 100, so that it does not start cold
# again, and few enough to be copied and encoded at a stroke.
MAX_SAVED = 128
_BITE = 8  # tools


class _Window:
    """The most recent gaps, in order of arrival and in order of length."""

    __slots__ = ("recent", "sorted")

    def __init__(self) -> None:
        self.recent: deque[float] = deque()
        self.sorted: list[float] = []

    def add(self, gap_s: float) -> None:
        self.recent.append(gap_s)
        insort(self.sorted, gap_s)
        if len(self.recent) > MAX_RECORDS:
            del self.sorted[bisect_left(self.sorted, self.recent.popleft())]

    def saved(self) -> list[float]:
        return list(islice(self.recent, max(0, len(self.recent) - MAX_SAVED), None))


class RecordedGaps:
    """Continuum's S[f] and S: gaps in seconds by tool name, and of all; bounded in both.

    A gap longer than EDGES[-1] counts as that long.
    """

    def __init__(self) -> None:
        self._all = _Window()
        self._tools: OrderedDict[str, _Window] = OrderedDict()  # least recently seen first

    def add(self, tool: str | None, gap_s: float) -> None:
        """Record a gap after a call of `tool`, None if that is not known."""
        gap_s = min(gap_s, EDGES[-1])
        self._all.add(gap_s)
        if tool is None:
            return
        self._tools.setdefault(tool, _Window()).add(gap_s)
        touch_and_evict(self._tools, tool, MAX_TOOLS, lambda window: len(window.recent))

    def of(self, tool: str | None) -> tuple[Sequence[float], Sequence[float]]:
        """Gaps of `tool` and of all, ascending; views that the next `add` changes."""
        window = self._tools.get(tool) if tool is not None else None
        return (window.sorted if window else (), self._all.sorted)

    def to_state(self) -> Bites[dict[str, Any]]:
        """The most recent of each, some tools per bite."""
        tools = {}
        for number, (name, window) in enumerate(list(self._tools.items()), 1):
            tools[name] = window.saved()
            if number % _BITE == 0:
                yield
        return {"all": self._all.saved(), "tools": tools}

    def load_state(self, state: object) -> int:
        """Take over what to_state gave; returns how many parts did not fit and were dropped."""
        if not isinstance(state, Mapping) or not isinstance(state.get("tools"), Mapping):
            return 1
        num_dropped = _refill(self._all, state.get("all"))
        for name, gaps in list(state["tools"].items())[-MAX_TOOLS:]:
            window = _Window()
            num_dropped += _refill(window, gaps)
            if window.recent:
                self._tools[str(name)] = window
        return num_dropped


def _refill(window: _Window, gaps: object) -> int:
    """Put `gaps` into `window`; 1 if some of them are no gaps."""
    if not isinstance(gaps, list):
        return 1
    fitting = [g for g in gaps if isinstance(g, float) and 0.0 <= g <= EDGES[-1]]
    for gap_s in fitting[-MAX_RECORDS:]:
        window.add(gap_s)
    return int(len(fitting) < len(gaps))
