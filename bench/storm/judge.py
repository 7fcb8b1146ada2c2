"""What is kept of a storm: requests by how they ended, looks at the server. And what must be true
of it: every finding with its numbers, and whether it holds."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.serve.metrics import Metrics, total

ABORTED = "hung up by us"  # the client's own doing; not a status
# vLLM's own answer to reset_running_requests while a step or a load is under way
# (v1/core/sched/scheduler.py, reset_prefix_cache), as docs/switch-off.md says
RESET_REFUSED = "reset refused by vLLM"
EXPECTED = {"200", "400", ABORTED, RESET_REFUSED}  # 400: the client's mistake
KEPT = 20  # examples of what was not expected


@dataclass
class Ended:
    """How a request ended: a status, ABORTED, or what is wrong in words."""

    status: str
    text: str = ""  # of the answer, or of the error


@dataclass
class Tally:
    """Requests by how they ended."""

    by_status: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)

    def add(self, ended: Ended, what: str) -> None:
        """Count one; `what` was sent."""
        self.by_status[ended.status] += 1
        if ended.status not in EXPECTED and len(self.unexpected) < KEPT:
            said = " ".join(ended.text.split())[:200]
            self.unexpected.append(f"{ended.status}: {what}: {said}")

    @property
    def num_unexpected(self) -> int:
        return sum(n for status, n in self.by_status.items() if status not in EXPECTED)


@dataclass(frozen=True)
class Look:
    """What there is after so many requests. `num_bytes`: of the process; `tables`: items by
    container of ours."""

    done: int
    num_steps: int
    num_bytes: float
    num_objects: int
    metrics: Metrics
    tables: dict[str, int]


@dataclass
class Run:
    """What the server did in the storm. `open_accounts`, `held`: of the idle server at the end."""

    tally: Tally = field(default_factory=Tally)
    looks: list[Look] = field(default_factory=list)
    virtual_s: float = 0.0
    open_accounts: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)


# --- what must be true ------------------------------------------------------------------------
MOST_LOST = 0.05  # of all looked-up tokens, by which hits may fall
ENOUGH = 1000  # requests; below that, a server still grows for many reasons
FULL = 20_000  # requests by which the largest table is at its bound
GROWN, FEW = 1.1, 64  # items: larger is what is so by this factor, and by so many
MOST_GROWTH = 0.05  # of the process's level, over the whole storm
HITS = {  # who counts, what is found and what is looked up
    "all tiers": ("continuum:hit_tokens_total", "continuum:prompt_tokens_total"),
    "vLLM's own count": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
}


class Verdict(enum.Enum):
    """What a finding comes to."""

    OK = "ok"
    WRONG = "WRONG"
    UNSEEN = "not seen"


@dataclass(frozen=True)
class Finding:
    """One thing that must be true."""

    what: str
    verdict: Verdict
    text: str


def judge(run: Run) -> list[Finding]:
    """Every finding, in the order in which they are printed."""
    return [_statuses(run), _worked(run), _ledger(run), _hits(run), _containers(run), _memory(run)]


def _found(what: str, holds: bool, text: str) -> Finding:
    return Finding(what, Verdict.OK if holds else Verdict.WRONG, text)


def _statuses(run: Run) -> Finding:
    count = run.tally.num_unexpected
    return _found("statuses", not count, f"{count} requests ended otherwise than with 200 or 400")


def _worked(run: Run) -> Finding:
    """A connector that did nothing would pass all the rest."""
    names = ("pins_started_total", "stores_total", "loads_total")
    did = {name: total(run.looks[-1].metrics, f"continuum:{name}") for name in names}
    text = ", ".join(f"{value:.0f} {name.split('_')[0]}" for name, value in did.items())
    return _found("connector", all(did.values()), text)


def _ledger(run: Run) -> Finding:
    wrong = [*run.open_accounts, *(f"{name} = {value:g}" for name, value in run.held.items())]
    return _found("ledger", not wrong, "; ".join(wrong) or "closed, and nothing held once idle")


def _hits(run: Run) -> Finding:
    """By counters: over the first half of the requests, and over the last quarter."""
    rates = {who: [_rate(run, *of, *part) for part in HALVES] for who, of in HITS.items()}
    text = "; ".join(f"{who} {a:.0%} early, {b:.0%} late" for who, (a, b) in rates.items())
    if run.tally.by_status.total() < ENOUGH:
        return Finding("hits", Verdict.UNSEEN, text)
    return _found("hits", all(b >= a - MOST_LOST for a, b in rates.values()), text)


HALVES = ((0.0, 0.5), (0.75, 1.0))


def _rate(run: Run, found: str, asked: str, low: float, high: float) -> float:
    """Tokens found of tokens looked up, in one part of the requests."""

    looks = _part(run, low, high)

    def added(name: str) -> float:
        return total(looks[-1].metrics, name) - total(looks[0].metrics, name)

    return added(found) / added(asked) if added(asked) else 0.0


# --- what grows: medians of looks, for what runs and waits differs from one to the next -------
def _part(run: Run, low: float, high: float) -> Sequence[Look]:
    last = run.looks[-1].done
    return [look for look in run.looks if low * last <= look.done <= high * last]


def _containers(run: Run) -> Finding:
    """None has more items in the last quarter than in the one around the middle."""
    if run.looks[-1].done < FULL:
        text = f"below {FULL:,} requests tables still fill"
        return Finding("containers", Verdict.UNSEEN, text)
    middle, last = (_medians(_part(run, *ends)) for ends in ((3 / 8, 5 / 8), (3 / 4, 1)))
    both = {name: (middle.get(name, 0.0), size) for name, size in sorted(last.items())}
    grown = {name: (a, b) for name, (a, b) in both.items() if b > GROWN * a and b > a + FEW}
    named = (f"{name}: {a:,.0f}, then {b:,.0f}" for name, (a, b) in grown.items())
    num = len(run.looks[-1].tables)
    text = "; ".join([f"{len(grown)} of {num} are larger at the end than in the middle", *named])
    return _found("containers", not grown, text)


def _medians(looks: Sequence[Look]) -> dict[str, float]:
    names = {name for look in looks for name in look.tables}
    found = {name: median(look.tables.get(name, 0) for look in looks) for name in names}
    return {**found, "Python objects": median(look.num_objects for look in looks)}


def _memory(run: Run) -> Finding:
    """There is no stock to compare with: the storm's own client is in this process, too. The first
    half is its warming up; between the middles of the last two quarters lies a quarter."""
    if (requests := run.looks[-1].done) < ENOUGH:
        text = f"below {ENOUGH:,} requests a process still grows"
        return Finding("memory", Verdict.UNSEEN, text)
    third, last = (
        median(look.num_bytes for look in _part(run, *ends))
        for ends in ((1 / 2, 3 / 4), (3 / 4, 1))
    )
    grown = 4 * (last - third)
    text = (
        f"{1000 * grown / requests / 2**20:+.3f} MiB per 1,000 requests, {grown / third:+.1%} of "
        f"{third / 2**20:.0f} MiB over {requests:,}"
    )
    return _found("memory", grown <= MOST_GROWTH * third, text)
