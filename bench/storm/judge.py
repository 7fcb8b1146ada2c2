"""What must be true after a storm: every finding with its numbers, and whether it holds."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.serve.metrics import Metrics, total
from bench.sim import census
from bench.storm.arm import ArmRun, Look
from bench.storm.slopes import growth

MOST_LOST = 0.05  # of all looked-up tokens, by which hits may fall
ENOUGH = 1000  # requests; below that, a server still grows for many reasons
FULL = 20_000  # requests by which the largest table is at its bound
MOST_GROWTH = 0.05  # of the process's level, over the whole storm


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


def judge(run: ArmRun) -> list[Finding]:
    """Every finding, in the order in which the report prints them."""
    return [_statuses(run), _worked(run), _ledger(run), _hits(run), _containers(run), _memory(run)]


def found(what: str, holds: bool, text: str) -> Finding:
    """What a condition comes to."""
    return Finding(what, Verdict.OK if holds else Verdict.WRONG, text)


def _statuses(run: ArmRun) -> Finding:
    count = run.tally.num_unexpected
    return found("statuses", not count, f"{count} requests ended otherwise than with 200 or 400")


def _worked(run: ArmRun) -> Finding:
    """A connector that did nothing would pass all the rest."""
    last = run.scrapes[-1][1] if run.scrapes else {}
    names = ("pins_started_total", "stores_total", "loads_total")
    did = {name: total(last, f"continuum:{name}") for name in names}
    text = ", ".join(f"{value:.0f} {name.split('_')[0]}" for name, value in did.items())
    return found("connector", all(did.values()), text)


def _ledger(run: ArmRun) -> Finding:
    wrong = [*run.open_accounts, *(f"{name} = {value:g}" for name, value in run.held.items())]
    return found("ledger", not wrong, "; ".join(wrong) or "closed, and nothing held once idle")


# --- what grows ---------------------------------------------------------------------------
def _containers(run: ArmRun) -> Finding:
    if run.looks[-1].done < FULL:
        text = f"below {FULL:,} requests tables still fill"
        return Finding("containers", Verdict.UNSEEN, text)
    grown, num = grown_of(run.looks), len(run.looks[-1].tables)
    named = (f"{name}: {a:,.0f}, then {b:,.0f}" for name, (a, b) in sorted(grown.items()))
    text = "; ".join([f"{len(grown)} of {num} are larger at the end than in the middle", *named])
    return found("containers", not grown, text)


def grown_of(looks: Sequence[Look]) -> dict[str, tuple[float, float]]:
    """What is larger in the last quarter than in the one around the middle: medians of both, for
    what runs and waits differs from look to look."""
    last = looks[-1].done
    middle, late = (
        _medians([look for look in looks if low * last <= look.done <= high * last])
        for low, high in ((3 / 8, 5 / 8), (3 / 4, 1.0))
    )
    return census.larger(middle, late)


def _medians(looks: Sequence[Look]) -> dict[str, float]:
    names = {name for look in looks for name in look.tables}
    found = {name: statistics.median(look.tables.get(name, 0) for look in looks) for name in names}
    return {**found, "Python objects": statistics.median(look.num_objects for look in looks)}


def _memory(run: ArmRun) -> Finding:
    """There is no stock to compare with: the storm's own client is in this process, too."""
    grown = growth([done for done, _ in run.samples], [size for _, size in run.samples])
    share = grown.slope * grown.requests / 1000 / grown.level
    text = (
        f"{grown.slope / 2**20:+.3f} MiB per 1,000 requests, {share:+.1%} of "
        f"{grown.level / 2**20:.0f} MiB over {grown.requests:,}"
    )
    if grown.requests < ENOUGH:
        return Finding("memory", Verdict.UNSEEN, text)
    return found("memory", share <= MOST_GROWTH, text)


# --- hits ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class HitRate:
    """Tokens found of tokens looked up, in one part of a storm."""

    early: float
    late: float


def hit_rate(run: ArmRun, found: Sequence[str], asked: str) -> HitRate:
    """By counters: over the first half of the requests, and over the last quarter."""
    done = run.scrapes[-1][0] if run.scrapes else 0

    def between(low: float, high: float) -> float:
        before, after = (_at(run.scrapes, done * share) for share in (low, high))
        sums = [sum(total(m, name) for name in found) for m in (before, after)]
        looked_up = total(after, asked) - total(before, asked)
        return (sums[1] - sums[0]) / looked_up if looked_up else 0.0

    return HitRate(between(0.0, 0.5), between(0.75, 1.0))


def _at(scrapes: Sequence[tuple[int, Metrics]], done: float) -> Metrics:
    return min(scrapes, key=lambda scrape: abs(scrape[0] - done))[1] if scrapes else {}


VLLM_HITS = (("vllm:prefix_cache_hits_total",), "vllm:prefix_cache_queries_total")
OUR_HITS = (("continuum:hit_tokens_total",), "continuum:prompt_tokens_total")


def _hits(run: ArmRun) -> Finding:
    vllms, ours = hit_rate(run, *VLLM_HITS), hit_rate(run, *OUR_HITS)
    text = (
        f"all tiers {ours.early:.0%} early, {ours.late:.0%} late; "
        f"vLLM's own count {vllms.early:.0%}, {vllms.late:.0%}"
    )
    if run.tally.num_ended < ENOUGH:
        return Finding("hits", Verdict.UNSEEN, text)
    return found("hits", all(r.late >= r.early - MOST_LOST for r in (vllms, ours)), text)
