"""Forecast: when a program's next turn will come, as a distribution and not a mean.

Gaps of agents span six decades, so the distribution is kept on a grid of
quarter octaves: two neighbours differ by 19 %, less than any two policies care about.

Survival counts how long gaps last, on the same grid. Three facts shape it. Gaps are heavy-tailed,
so it keeps a curve instead of moments: a ten-minute outlier is one count in one bin. A program that
has not come back tells us something, too (its gap is longer than this), so it counts not only who
returned but also who left the risk set and when: the product-limit estimate of Kaplan and Meier.
And a few observations must lean on more general ones: `shrunk` counts a parent's curve as `weight`
more observations. That is the Bayes estimate under a Dirichlet prior with that curve (Susarla and
Van Ryzin, 1976); without open gaps it is simply the weighted mean of the observed and the parent's
distribution.

Gaps: the time from the end of a program's turn to the arrival of its next one. It follows those
that are open, and teaches both of these by them.

ToolTimes: how long a program is away, by what its turn asked for; learned while serving. It is a
tree of survival curves: tool -> all tools -> every gap -> a prior, and people -> every gap. Each
counts its own gaps and its parent's curve as PRIOR_WEIGHT more gaps, so a curve is a sensible
guess before its first gap and its own after some dozen.

RecordedGaps keeps the gaps themselves, for the one rule that needs samples: Continuum, Equation 2.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, pairwise
from statistics import NormalDist
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from continuum_connector.toolcalls import Asked, Ending

Row = npt.NDArray[np.float64]  # a number per bin

# Seconds: 20 ms, less than any tool call through HTTP takes, to a day and a half.
EDGES: tuple[float, ...] = tuple(0.02 * 2 ** (k / 4) for k in range(91))
_NOBODY = 1e-6  # a share of programs
_WIDTHS = tuple(high - low for low, high in pairwise(EDGES))


class Forecast:
    """P(gap <= t) on EDGES, linear between them. What the last one lacks to 1 never returns.

    `num_seen`: how many observations of exactly this kind of call it is based on, where older ones
    count less. Immutable.
    """

    def __init__(self, cdf: Sequence[float], num_seen: float = 0.0) -> None:
        """`cdf[i]` is P(gap <= EDGES[i]), which never falls and stays within 0 and 1."""
        if len(cdf) != len(EDGES):
            raise ValueError(f"{len(cdf)} values for {len(EDGES)} edges")
        self.cdf = tuple(cdf)
        self.num_seen = num_seen

    @classmethod
    def known(cls, gap_s: float) -> Forecast:
        """A certain forecast: a return after `gap_s`, to the grid's precision."""
        return cls([1.0 if edge >= gap_s else 0.0 for edge in EDGES], math.inf)

    @classmethod
    def never(cls) -> Forecast:
        """The forecast for a program that will not be back."""
        return cls([0.0] * len(EDGES), math.inf)

    @classmethod
    def longest(cls, forecasts: Sequence[Forecast]) -> Forecast:
        """The forecast of the longest of several independent calls; needs at least one."""
        cdf = [math.prod(values) for values in zip(*(f.cdf for f in forecasts), strict=True)]
        return cls(cdf, min(f.num_seen for f in forecasts))

    def within(self, t: float) -> float:
        """P(gap <= t)."""
        if t >= EDGES[-1]:
            return self.cdf[-1]
        if t <= 0.0:
            return 0.0
        index = bisect_right(EDGES, t)
        low, p_low = (EDGES[index - 1], self.cdf[index - 1]) if index else (0.0, 0.0)
        return p_low + (self.cdf[index] - p_low) * (t - low) / (EDGES[index] - low)

    def held(self, t: float) -> float:
        """Seconds for which a pin of TTL `t` is held on average: the integral of P(gap > u)."""
        if t >= EDGES[-1]:
            return self.held_at[-1] + (t - EDGES[-1]) * (1.0 - self.cdf[-1])
        if t <= 0.0:
            return 0.0
        index, low, p_low, held = bisect_right(EDGES, t), 0.0, 0.0, 0.0
        if index:
            low, p_low, held = EDGES[index - 1], self.cdf[index - 1], self.held_at[index - 1]
        return held + (t - low) * (1.0 - (p_low + self.within(t)) / 2)

    def quantile(self, q: float) -> float:
        """The time by which a share `q` of programs has returned; infinity if fewer ever do."""
        index = next((i for i, p in enumerate(self.cdf) if p >= q), None)
        if index is None:
            return math.inf
        low, p_low = (EDGES[index - 1], self.cdf[index - 1]) if index else (0.0, 0.0)
        p_high = self.cdf[index]
        share = (q - p_low) / (p_high - p_low) if p_high > p_low else 1.0
        return low + share * (EDGES[index] - low)

    @cached_property
    def held_at(self) -> tuple[float, ...]:
        """`held` at each of EDGES, as `cdf` is `within` there."""
        first = EDGES[0] * (1.0 - self.cdf[0] / 2)
        pairs = zip(_WIDTHS, pairwise(self.cdf), strict=True)
        parts = [width * (1.0 - (low + high) / 2) for width, (low, high) in pairs]
        return tuple(accumulate(parts, initial=first))

    @cached_property
    def row(self) -> Row:
        """`cdf` as numpy has it."""
        return np.array(self.cdf)

    @cached_property
    def held_row(self) -> Row:
        """`held_at` as numpy has it."""
        return np.array(self.held_at)

    def soonest(self, age: float) -> float:
        """Seconds of keeping that one return costs at best, after `age` seconds without a return.

        The least H / P over all times at which to give up: the remaining gap if it is known, more
        if a return is unsure, infinity if none is expected any more. Its inverse is the Gittins
        index of the kept blocks. So a program that will return within 1 s or else never is not
        confused with one that is certainly away for an hour.
        """
        return self._soonest(age) if age > 0.0 else self._soonest_of_all

    @cached_property
    def _soonest_of_all(self) -> float:
        """The same for a program that has just left, which every turn's end asks for."""
        return self._soonest(0.0)

    def _soonest(self, age: float) -> float:
        first, best = bisect_right(EDGES, age), math.inf
        if first == _NUM_BINS:
            return best
        p_now, held_now = self.within(age), self.held(age)
        most = self.cdf[-1] - p_now
        if most <= _NOBODY:
            return best
        # A plain loop that stops early, because this is called for dozens of programs at a time.
        for p, held in zip(self.cdf[first:], self.held_at[first:], strict=True):
            kept_s, back = held - held_now, p - p_now
            if kept_s >= best * most:  # even if all of them were back by then
                break
            if back > _NOBODY and kept_s < best * back:
                best = kept_s / back
        return best


def came_true(gap_s: float | None, watched_s: float, horizon_s: float) -> bool | None:
    """Whether the program returned within `horizon_s`; None while nobody can know.

    `gap_s`: after how long it returned, None if it did not. `watched_s`: how long we then waited
    for it, 0 if nobody can say.
    """
    if gap_s is not None:
        return gap_s <= horizon_s
    return False if watched_s >= horizon_s else None


Curve: TypeAlias = "Sequence[float] | Row"  # P(gap > EDGES[i])

# An observation counts half after so many more of its key. A key is then based on up to 145, which
# gives a share of one half to within 4 points, and adapts to a new distribution within 100.
# bench/gaps of c109eba, on a trace: 50 to 200 forecast about equally well, longer no better.
HALF_LIFE = 100

_GROWTH = 2.0 ** (1.0 / HALF_LIFE)  # new observations weigh more; old ones are not scaled down
_TOO_HEAVY = 1e6  # at this weight everything is scaled down, once in 20 half-lives
_MOST = 1e12  # no count can be above it
_ONE = np.ones(1)
_NUM_BINS = len(EDGES)  # bin i ends at EDGES[i]; a gap longer than the last edge has no bin


class Survival:
    """The counts of one key, in 2 KB. `add` costs a microsecond, `shrunk` about ten."""

    __slots__ = ("_counts", "_total", "_unit")

    def __init__(self) -> None:
        # Two rows, one number per bin. 0: who returned in it. 1: + who left the risk set at its
        # end, - who enters it there: the sum from bin i upwards is how many were at risk in i.
        # An array, because single items are quick to change; numpy views it when all are needed.
        self._counts = array("d", bytes(8 * 2 * _NUM_BINS))
        self._unit = 1.0  # the weight of an observation made now
        self._total = 0.0

    @property
    def num_seen(self) -> float:
        """The number of observations, where older ones count less."""
        return self._total / self._unit

    def add(self, gap_s: float, is_over: bool = True, after_s: float = 0.0) -> None:
        """Count a gap that ended after `gap_s`, or one of that age that has not ended.

        Its first `after_s` seconds were counted before, by an `add` with `is_over` False.
        """
        first = bisect_right(EDGES, after_s)
        # A bin in which an open gap is still under way says nothing about it yet.
        last = bisect_left(EDGES, gap_s) if is_over else bisect_right(EDGES, gap_s) - 1
        is_over = is_over and last < _NUM_BINS
        last = min(last, _NUM_BINS - 1)
        if last < first:
            return
        if after_s <= 0.0:  # each gap counts once
            self._grow()
            self._total += self._unit
        self._counts[_NUM_BINS + last] += self._unit
        if first:
            self._counts[_NUM_BINS + first - 1] -= self._unit
        if is_over:
            self._counts[last] += self._unit

    def shrunk(self, parent: Curve, weight: float) -> Row:
        """P(gap > EDGES[i]), with the parent's curve counted as `weight` new observations."""
        returned, left = np.frombuffer(self._counts).reshape(2, _NUM_BINS)
        after = np.asarray(parent)
        before = np.concatenate((_ONE, after[:-1]))
        pull = weight * self._unit
        at_risk = np.cumsum(left[::-1])[::-1] + pull * before
        at_risk = np.maximum(at_risk, 1e-12)  # with nobody at risk, nobody returns
        hazard = (returned + pull * (before - after)) / at_risk
        return np.cumprod(np.clip(1.0 - hazard, 0.0, 1.0))

    def _grow(self) -> None:
        self._unit *= _GROWTH
        if self._unit > _TOO_HEAVY:
            self._counts = array("d", [x / self._unit for x in self._counts])
            self._total /= self._unit
            self._unit = 1.0


# The seeds: typical gaps of well-known tools, for the first few calls. Every number was measured
# elsewhere, on other machines and for other work, so a seed weighs as much as a handful of
# observations (PRIOR_WEIGHT) and fades as soon as there are some. Sources: SWE-Bench agents, tools
# of 0.925 s on average (Continuum, Table 2); coding agents, gaps of p10 4 s, p50 9 s, p90 72 s, and
# people, p50 127 s, p90 1,543 s (public Claude Code traces); single commands in a sandbox: editor
# 0 s, grep 0.2 s, pytest of a path 0.7 s, of everything 6.9 s, pip install 8.2 s. The spreads of
# single commands are guesses, and wide ones.
_NORMAL = NormalDist()
_LASTS_LONGER = 1.0  # sigma of ln(gap): nine in ten between a quarter and four times the median


def log_normal(median_s: float, sigma: float = _LASTS_LONGER, never: float = 0.01) -> Curve:
    """Gaps around `median_s`. `sigma`: that of their logarithm. A share of `never` has no end."""
    mu = math.log(median_s)
    return tuple(
        never + (1.0 - never) * (1.0 - _NORMAL.cdf((math.log(edge) - mu) / sigma)) for edge in EDGES
    )


def mixture(*parts: tuple[float, Curve]) -> Curve:
    """The curve of (share, curve) pairs; shares add up to 1."""
    shares = [share for share, _ in parts]
    curves = zip(*(curve for _, curve in parts), strict=True)
    return tuple(sum(s * p for s, p in zip(shares, ps, strict=True)) for ps in curves)


FAST = log_normal(0.45, 1.2)  # mean 0.92 s: a tool in a sandbox
AGENT = mixture((0.7, log_normal(7.0, 0.5)), (0.3, log_normal(45.0, 1.2)))  # 4, 9, 84 s
PERSON = log_normal(127.0, 1.8, never=0.1)  # one answer in ten is the last
TOOLS = mixture((0.5, FAST), (0.5, AGENT))  # a tool of which nothing is known
EVERYTHING = mixture((0.85, TOOLS), (0.15, PERSON))  # a turn of which nothing is known

_EDITOR, _LOOK, _SEARCH = log_normal(0.05), log_normal(0.1), log_normal(0.2)
_NETWORK, _INSTALL, _BUILD = log_normal(2.0, 1.2), log_normal(8.0, 1.2), log_normal(10.0, 1.5)
_TESTS = mixture((0.6, log_normal(0.75)), (0.4, log_normal(7.0, 1.3)))  # a path; everything
_SCRIPT = log_normal(0.6, 1.5)

_NAMES: dict[str, Curve] = {
    "str_replace_editor str_replace_based_edit_tool edit_file write_file apply_patch sed": _EDITOR,
    "cd ls cat head tail pwd echo mkdir cp mv rm nl wc touch read_file list_files": _LOOK,
    "grep rg find awk git search": _SEARCH,
    "curl wget fetch_url web_search fetch": _NETWORK,
    "pip npm apt apt-get conda uv yarn pnpm": _INSTALL,
    "make cmake cargo mvn gradle ninja docker": _BUILD,
    "pytest tox unittest": _TESTS,
    "python python3 node": _SCRIPT,
}
BY_TOOL: dict[str, Curve] = {
    name: curve for names, curve in _NAMES.items() for name in names.split()
}


T = TypeVar("T")

# With fewer observations, a key's curve is mostly its parent's, so little is lost with the key.
FEW = 8.0
# A parent's curve counts as so many observations; 4 to 16 are about equally good (bench/gaps of
# c109eba).
PRIOR_WEIGHT = FEW

# Agents have tens of tools, a shell some hundred commands. Beyond this, tools are forgotten
# (touch_and_evict), in either table.
MAX_TOOLS = 256
_TOLERANCE = 0.01
_MAX_NAME = 100  # characters; longer names are cut


class _Key:
    """One node of the tree. Its curve is computed again after 1 % more gaps, or after its parent's.

    So the curves at the top, which every gap changes a little, are not computed for each gap.
    """

    __slots__ = ("_curve", "_forecast", "_num_new", "_of", "_seed", "counts")

    def __init__(self, seed: Curve | None = None) -> None:
        self.counts = Survival()
        self._seed = seed
        self._curve: Row | None = None
        self._of: object = None  # the parent's curve from which it was computed
        self._forecast: Forecast | None = None
        self._num_new = 0  # gaps since the curve was computed

    def add(self, gap_s: float, is_over: bool, after_s: float) -> None:
        self.counts.add(gap_s, is_over, after_s)
        self._num_new += 1
        if self._num_new > _TOLERANCE * self.counts.num_seen:
            self._curve = self._forecast = None

    def curve(self, parent: Curve) -> Row:
        """P(gap > EDGES[i]), given the parent's curve."""
        if self._curve is None or self._of is not parent:
            prior = _prior(parent, self._seed)
            self._curve, self._of = self.counts.shrunk(prior, PRIOR_WEIGHT), parent
            self._forecast, self._num_new = None, 0
        return self._curve

    def forecast(self, parent: Curve) -> Forecast:
        """The same curve as a Forecast."""
        if self._forecast is None or self._of is not parent:
            self._forecast = _forecast(self.curve(parent), self.counts.num_seen)
        return self._forecast


class ToolTimes:
    """Observes gaps and forecasts the next one. Has no clock; for one thread; bounded by MAX_TOOLS.

    After several calls the program is back when the longest is done. So the forecast is that of the
    longest of independent calls, and the gap teaches the call that was expected to be the longest.
    About the others it says only "not longer", which is weak, and as their gap it would be wrong:
    `cd x && pytest` would make `cd` slow. Only if none of them is known does the gap teach all.
    Calls of one tool count as one, both in the forecast and in what is learned.
    """

    def __init__(self) -> None:
        self._everything = _Key()
        self._people = _Key(PERSON)
        self._all_tools = _Key(TOOLS)
        self._tools: OrderedDict[str, _Key] = OrderedDict()  # least recently seen first

    def observe(
        self, asked: Asked, gap_s: float, is_over: bool = True, after_s: float = 0.0
    ) -> None:
        """Learn from a gap after `asked` that ended after `gap_s`, or is still open at that age.

        `after_s`: up to which age it was observed before, when it was open. Costs microseconds.
        """
        keys = [self._everything]
        if asked.ending is Ending.CALLS:
            keys += [self._all_tools, *map(self._tool, self._to_teach(asked))]
        elif asked.ending is Ending.ANSWER:
            keys.append(self._people)
        for key in keys:
            key.add(gap_s, is_over, after_s)

    def forecast(self, asked: Asked) -> Forecast:
        """When the program will be back. Costs some tens of microseconds after a change."""
        if asked.tools:
            parts = [self._of_tool(name) for name in dict.fromkeys(asked.tools)]
            return Forecast.longest(parts) if len(parts) > 1 else parts[0]
        if asked.ending is Ending.CALLS:  # calls whose names could not be read
            return self._all_tools.forecast(self._everything.curve(EVERYTHING))
        if asked.ending is Ending.ANSWER:
            return self._people.forecast(self._everything.curve(EVERYTHING))
        return self._everything.forecast(EVERYTHING)

    def longest(self, asked: Asked) -> str | None:
        """The tool whose call is expected to take longest; None without calls."""
        if len(asked.tools) < 2:
            return asked.tools[0] if asked.tools else None
        return max(asked.tools, key=lambda name: self._of_tool(name).quantile(0.5))

    def _to_teach(self, asked: Asked) -> Sequence[str]:
        """The tool that a gap teaches; all of them if none is known."""
        names = tuple(dict.fromkeys(asked.tools))
        known = any(name in BY_TOOL or _short(name) in self._tools for name in names)
        longest = self.longest(asked)
        return (longest,) if known and longest else names

    def _of_tool(self, name: str) -> Forecast:
        """The forecast for one call. This does not add an unknown name to the table."""
        parent = self._all_tools.curve(self._everything.curve(EVERYTHING))
        tool = self._tools.get(_short(name))
        if tool is None:
            return _forecast(_prior(parent, BY_TOOL.get(name)), 0.0)
        return tool.forecast(parent)

    def _tool(self, name: str) -> _Key:
        name = _short(name)
        tool = self._tools.get(name)
        if tool is None:
            tool = self._tools[name] = _Key(BY_TOOL.get(name))
        touch_and_evict(self._tools, name, MAX_TOOLS, lambda key: key.counts.num_seen)
        return tool


def _prior(parent: Curve, seed: Curve | None) -> Curve:
    """What to expect of a key before its first gap; a seed makes up half of it."""
    if seed is None:
        return parent
    both: Row = (np.asarray(parent) + np.asarray(seed)) / 2.0
    return both


def _forecast(curve: Curve, num_seen: float) -> Forecast:
    cdf: list[float] = (1.0 - np.asarray(curve)).tolist()
    return Forecast(cdf, num_seen)


def _short(name: str) -> str:
    return name[:_MAX_NAME]


def touch_and_evict(
    keys: OrderedDict[str, T], name: str, limit: int, num_seen: Callable[[T], float]
) -> None:
    """`name`, one of `keys`, was seen just now. If there are more than `limit`, forget one.

    That is the least recently seen of those with fewer than FEW observations, else of all, but
    never `name`. So a flood of new names pushes itself out, and a new tool still finds a place.
    Costs 30 us at worst, for 256 keys.
    """
    keys.move_to_end(name)
    if len(keys) <= limit:
        return
    others = islice(keys.items(), len(keys) - 1)
    little_known = (key for key, value in others if num_seen(value) < FEW)
    del keys[next(little_known, next(iter(keys)))]


MAX_RECORDS = 1000  # the most recent of a tool: ten times what the paper needs (its K = 100)


@dataclass(eq=False, slots=True)
class _Window:
    """The most recent gaps, both by arrival and by length."""

    recent: deque[float] = field(default_factory=deque)
    sorted: list[float] = field(default_factory=list)

    def add(self, gap_s: float) -> None:
        self.recent.append(gap_s)
        insort(self.sorted, gap_s)
        if len(self.recent) > MAX_RECORDS:
            del self.sorted[bisect_left(self.sorted, self.recent.popleft())]


class RecordedGaps:
    """Continuum's S[f] and S: gaps in seconds, by tool and over all tools. Both are bounded.

    A gap longer than EDGES[-1] counts as that long.
    """

    def __init__(self) -> None:
        self._all = _Window()
        self._tools: OrderedDict[str, _Window] = OrderedDict()  # least recently seen first

    def add(self, tool: str | None, gap_s: float) -> None:
        """Record a gap after a call of `tool`; None if the tool is unknown."""
        gap_s = min(gap_s, EDGES[-1])
        self._all.add(gap_s)
        if tool is None:
            return
        self._tools.setdefault(tool, _Window()).add(gap_s)
        touch_and_evict(self._tools, tool, MAX_TOOLS, lambda window: len(window.recent))

    def of(self, tool: str | None) -> tuple[Sequence[float], Sequence[float]]:
        """Gaps of `tool` and of all tools, ascending. The next `add` changes these views."""
        window = self._tools.get(tool) if tool is not None else None
        return (window.sorted if window else (), self._all.sorted)


# Seconds, on edges of the grid: 82 s, 5 and 22 minutes, 1.5, 6 and 23 hours, then the grid's end.
# A gap of this age counts as observed and still open. Otherwise we would learn of programs that
# never return only when they are forgotten, hours later, and forecasts would be too optimistic.
MILESTONES: tuple[float, ...] = (*EDGES[48::8], EDGES[-1])

_MAX_OBSERVED = 4  # gaps that may pass a milestone per call, which is more than a call can open


@dataclass(eq=False)
class Gap:
    """A gap that has not ended. `milestone`: the next one that it will pass."""

    asked: Asked
    since: float
    milestone: int = 0

    @property
    def observed_s(self) -> float:
        """The age up to which it has been observed."""
        return MILESTONES[self.milestone - 1] if self.milestone else 0.0


class Gaps:
    """Learns from gaps, both open and ended. Who is in which gap, others know (Away).

    For one thread; `now` is monotonic seconds and must not fall. Each call costs some
    microseconds, whatever the number of gaps; `forecast` some tens (ToolTimes).
    """

    def __init__(self) -> None:
        # Open gaps by their next milestone, oldest first, so only the first of each can be due.
        self._open: tuple[OrderedDict[Gap, None], ...] = tuple(OrderedDict() for _ in MILESTONES)
        self._due = math.inf  # no gap passes a milestone before
        self._times = ToolTimes()
        self._recorded = RecordedGaps()
        self.forecast = self._times.forecast  # when a program is back that ended with such a turn

    def __len__(self) -> int:
        return sum(map(len, self._open))

    def begin(self, asked: Asked, now: float) -> Gap:
        """A program's turn has ended with `asked`. `arrived`, `ended` or `drop` ends the gap."""
        self._observe_open(now)
        gap = Gap(asked, now)
        self._open[0][gap] = None
        self._due = min(self._due, now + MILESTONES[0])
        return gap

    def arrived(self, gap: Gap | None, now: float) -> float | None:
        """A turn arrived: learn the gap before it, if there was one, and return its seconds."""
        seconds = None
        if gap is not None and self.drop(gap):
            seconds = max(0.0, now - gap.since)
            self.learn(gap, seconds)
        self._observe_open(now)
        return seconds

    def learn(self, gap: Gap, seconds: float) -> None:
        """A gap that is open no more has lasted for so long."""
        if gap.asked.ending is not Ending.ANSWER:  # the paper's programs wait for no people
            self._recorded.add(self._times.longest(gap.asked), seconds)
        self._times.observe(gap.asked, seconds, after_s=gap.observed_s)

    def ended(self, gap: Gap, now: float) -> None:
        """The gap's program is done or forgotten, so the gap is longer than it has lasted so
        far."""
        if self.drop(gap):
            self._times.observe(gap.asked, now - gap.since, is_over=False, after_s=gap.observed_s)

    def drop(self, gap: Gap) -> bool:
        """Forget the gap without learning from it. False: it was not open."""
        if gap.milestone == len(MILESTONES) or gap not in self._open[gap.milestone]:
            return False
        del self._open[gap.milestone][gap]
        return True

    def recorded(self, asked: Asked) -> tuple[Sequence[float], Sequence[float]]:
        """Recorded gaps in seconds, ascending, of this turn's tool and of all tools.

        If the turn called several tools, this takes the one that is expected to take longest. Valid
        until the next call that learns.
        """
        return self._recorded.of(self._times.longest(asked))

    def _observe_open(self, now: float) -> None:
        """Observe gaps that have passed a milestone, a few per call."""
        if now < self._due:
            return
        num_left = _MAX_OBSERVED
        self._due = math.inf
        for milestone, age in enumerate(MILESTONES):
            gaps = self._open[milestone]
            while gaps:
                gap = next(iter(gaps))
                if now - gap.since < age or not num_left:
                    self._due = min(self._due, gap.since + age)
                    break
                num_left -= 1
                self._pass(gap)

    def _pass(self, gap: Gap) -> None:
        age = MILESTONES[gap.milestone]
        self._times.observe(gap.asked, age, is_over=False, after_s=gap.observed_s)
        self.drop(gap)
        gap.milestone += 1
        if gap.milestone < len(MILESTONES):  # past the grid there is nothing left to learn
            self._open[gap.milestone][gap] = None
