"""ToolTimes: how long a program is away, by what its turn asked for; learned while serving.

A tree of survival curves: class of arguments -> tool -> all tools -> every gap -> a prior, and
people -> every gap. Each counts its own gaps and its parent's curve as PRIOR_WEIGHT more gaps, so
a curve is a sensible guess before its first gap and its own after some dozen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from continuum_connector.costs.state_file import Bites
from continuum_connector.forecast import seeds
from continuum_connector.forecast.bounded import FEW, touch_and_evict
from continuum_connector.forecast.forecast import Forecast
from continuum_connector.forecast.survival import Curve, Row, Survival
from continuum_connector.toolcalls.asked import Asked, Ending, ToolCall

# Observations that a parent's curve counts as. bench/gaps, where weak signs stand in for names,
# would have it at 16 or more; names with arguments tell much (they rank gaps with a Spearman
# correlation of 0.89 in public Claude Code traces), so a few of their own should soon count.
PRIOR_WEIGHT = FEW

# Agents have tens of tools, a shell some hundred commands. What exceeds this is forgotten
# (bounded.py); 30 MB if every key is asked about, 0.6 MB with 20 tools of 4 classes.
MAX_TOOLS = 256
MAX_CLASSES = 16  # of arguments, for each tool
_WORTH_SAVING = 2.0  # observations; what was seen once says little, and a flood of names is that
_TOLERANCE = 0.01
_MAX_NAME = 100  # characters; longer ones are the client's business


class _Key:
    """One node of the tree. Its curve is made anew after 1 % more gaps, or when its parent's was.

    So the curves at the top, which every gap changes a little, are not made for each of them.
    """

    __slots__ = ("_curve", "_forecast", "_num_new", "_of", "_seed", "classes", "counts")

    def __init__(self, seed: Curve | None = None) -> None:
        self.counts = Survival()
        self.classes: OrderedDict[str, _Key] = OrderedDict()
        self._seed = seed
        self._curve: Row | None = None
        self._of: object = None  # the parent's curve that it was made with
        self._forecast: Forecast | None = None
        self._num_new = 0  # gaps since the curve was made

    def add(self, gap_s: float, is_over: bool, after_s: float) -> None:
        self.counts.add(gap_s, is_over, after_s)
        self._num_new += 1
        if self._num_new > _TOLERANCE * self.counts.num_seen:
            self._curve = None

    def restore(self, counts: Survival) -> None:
        self.counts, self._curve = counts, None

    def curve(self, parent: Curve) -> Row:
        """P(gap > EDGES[i]), given the curve one up in the tree."""
        if self._curve is None or self._of is not parent:
            prior = _prior(parent, self._seed)
            self._curve, self._of = self.counts.shrunk(prior, PRIOR_WEIGHT), parent
            self._forecast, self._num_new = None, 0
        return self._curve

    def forecast(self, parent: Curve) -> Forecast:
        """The same as a Forecast."""
        curve = self.curve(parent)
        if self._forecast is None:
            self._forecast = _forecast(curve, self.counts.num_seen)
        return self._forecast


class ToolTimes:
    """Observes gaps, forecasts the next one. No clock; for one thread; bounded by MAX_TOOLS.

    Several calls: the program is back after the longest, so the forecast is that of the longest
    of independent calls, and the gap teaches the one that was expected to be it. To the others it
    says only "not longer", which is weak, and as their gap it would be wrong: `cd x && pytest`
    would make `cd` slow. Only when nothing is known of any of them does it teach all. Calls
    of the same class count as one, in the forecast as in what is learned.
    """

    def __init__(self) -> None:
        self._everything = _Key()
        self._people = _Key(seeds.PERSON)
        self._all_tools = _Key(seeds.TOOLS)
        self._tools: OrderedDict[str, _Key] = OrderedDict()  # least recently seen first

    def observe(
        self, asked: Asked, gap_s: float, is_over: bool = True, after_s: float = 0.0
    ) -> None:
        """Learn a gap after `asked`: over after `gap_s`, or still open at that age.

        `after_s`: what was observed of it before, as still open at that age. Costs microseconds.
        """
        keys = [self._everything]
        if asked.ending is Ending.CALLS:
            calls = self._to_teach(asked)
            keys += [self._all_tools, *map(self._tool, {call.name: None for call in calls})]
            keys += map(self._class, calls)
        elif asked.ending is Ending.ANSWER:
            keys.append(self._people)
        for key in keys:
            key.add(gap_s, is_over, after_s)

    def forecast(self, asked: Asked) -> Forecast:
        """When the program will be back; some tens of microseconds after something changed."""
        if asked.calls:
            parts = [self._of_call(call) for call in dict.fromkeys(asked.calls)]
            return Forecast.longest(parts) if len(parts) > 1 else parts[0]
        everything = self._everything.curve(seeds.EVERYTHING)
        if asked.ending is Ending.CALLS:  # of which nobody could read the name
            return self._all_tools.forecast(everything)
        if asked.ending is Ending.ANSWER:
            return self._people.forecast(everything)
        return self._everything.forecast(seeds.EVERYTHING)

    def longest(self, asked: Asked) -> ToolCall | None:
        """The call that is expected to take longest; None without calls."""
        if len(asked.calls) < 2:
            return asked.calls[0] if asked.calls else None
        return max(asked.calls, key=lambda call: self._of_call(call).quantile(0.5))

    def to_state(self) -> Bites[dict[str, Any]]:
        """What was learned, a tool per bite: about 3 us for each key."""
        tools = {}
        for name, tool in list(self._tools.items()):
            if tool.counts.num_seen >= _WORTH_SAVING:
                tools[name] = {"counts": tool.counts.to_state(), "classes": _saved(tool.classes)}
                yield
        roots = {name: key.counts.to_state() for name, key in self._roots()}
        return {"roots": roots, "tools": tools}

    def load_state(self, state: object) -> int:
        """Take over what to_state gave; returns how many parts did not fit and were dropped."""
        num_dropped = 0
        roots, tools = (_mapping(_mapping(state).get(part)) for part in ("roots", "tools"))
        for name, key in self._roots():
            num_dropped += name in roots and not _restore(key, roots[name])
        for name, saved in list(tools.items())[-MAX_TOOLS:]:
            if not isinstance(name, str):
                num_dropped += 1
                continue
            tool = self._tool(name)
            num_dropped += not _restore(tool, _mapping(saved).get("counts"))
            for arguments, counts in _mapping(_mapping(saved).get("classes")).items():
                num_dropped += not _restore(self._class(ToolCall(name, str(arguments))), counts)
        return num_dropped

    def _roots(self) -> Iterator[tuple[str, _Key]]:
        yield "everything", self._everything
        yield "people", self._people
        yield "all_tools", self._all_tools

    def _to_teach(self, asked: Asked) -> Sequence[ToolCall]:
        """The call that a gap is to teach, or all if nothing is known of any."""
        calls = tuple(dict.fromkeys(asked.calls))
        known = any(
            call.name in seeds.BY_TOOL or _short(call.name) in self._tools for call in calls
        )
        longest = self.longest(asked)
        return (longest,) if known and longest else calls

    def _of_call(self, call: ToolCall) -> Forecast:
        """The forecast for one call; a look, which leaves no trace of an unknown name."""
        parent = self._all_tools.curve(self._everything.curve(seeds.EVERYTHING))
        tool = self._tools.get(_short(call.name))
        if tool is None:
            return _forecast(_prior(parent, seeds.BY_TOOL.get(call.name)), 0.0)
        key = tool.classes.get(_short(call.arguments))
        if key is None:
            return _forecast(tool.curve(parent), 0.0)
        return key.forecast(tool.curve(parent))

    def _tool(self, name: str) -> _Key:
        name = _short(name)
        tool = self._tools.get(name)
        if tool is None:
            tool = self._tools[name] = _Key(seeds.BY_TOOL.get(name))
        touch_and_evict(self._tools, name, MAX_TOOLS, _num_seen)
        return tool

    def _class(self, call: ToolCall) -> _Key:
        classes = self._tool(call.name).classes
        name = _short(call.arguments)
        key = classes.get(name)
        if key is None:
            key = classes[name] = _Key()
        touch_and_evict(classes, name, MAX_CLASSES, _num_seen)
        return key


def _prior(parent: Curve, seed: Curve | None) -> Curve:
    """What is believed of a key before its first gap; a seed is half of it."""
    if seed is None:
        return parent
    both: Row = (np.asarray(parent) + np.asarray(seed)) / 2.0
    return both


def _forecast(curve: Curve, num_seen: float) -> Forecast:
    cdf: list[float] = (1.0 - np.asarray(curve)).tolist()
    return Forecast(cdf, num_seen)


def _short(name: str) -> str:
    return name[:_MAX_NAME]


def _num_seen(key: _Key) -> float:
    return key.counts.num_seen


def _saved(keys: Mapping[str, _Key]) -> dict[str, Any]:
    return {
        name: key.counts.to_state()
        for name, key in keys.items()
        if key.counts.num_seen >= _WORTH_SAVING
    }


def _restore(key: _Key, state: object) -> bool:
    counts = Survival.from_state(state)
    if counts is None:
        return False
    key.restore(counts)
    return True


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
