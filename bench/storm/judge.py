"""What must be true after a storm: every finding with its numbers, and whether it holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from bench.serve.metrics import Metrics, total
from bench.storm.arm import ArmRun
from bench.storm.processes import ROLES
from bench.storm.slopes import Growth, growth

MOST_EXCESS = 0.05  # of stock's level, by which ours may grow more than stock over the storm
MOST_LOST = 0.05  # of all looked-up tokens, by which hits may fall
ENOUGH = 1000  # requests; below that, a server still grows for many reasons
# How tracebacks end with which vLLM tells its log of a 400, or of a reset that it refuses.
REFUSALS = ("RequestValidationError", "JSONDecodeError", "UnicodeDecodeError")
REFUSALS += ("VLLMValidationError", "Failed to reset KV cache")


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


def judge(ours: ArmRun, stock: ArmRun | None) -> list[Finding]:
    """Every finding, in the order in which the report prints them."""
    return [
        _statuses(ours),
        _lives(ours),
        _log(ours, stock),
        _same_answers(ours, stock),
        _worked(ours),
        _ledger(ours),
        *_memory(ours, stock),
        _hits(ours),
    ]


def books(run: ArmRun) -> list[Finding]:
    """What must be true of any server of ours, one without a model included."""
    return [_statuses(run), _worked(run), _ledger(run), _hits(run)]


def found(what: str, holds: bool, text: str) -> Finding:
    """What a condition comes to."""
    return Finding(what, Verdict.OK if holds else Verdict.WRONG, text)


def _statuses(run: ArmRun) -> Finding:
    count = run.tally.num_unexpected
    return found("statuses", not count, f"{count} requests ended otherwise than with 200 or 400")


def _lives(run: ArmRun) -> Finding:
    return found("server", run.alive, "healthy at the end" if run.alive else "dead at the end")


def _log(ours: ArmRun, stock: ArmRun | None) -> Finding:
    """A traceback that is no refusal is a fault that somebody caught."""
    known = {_kind(end) for end in stock.tracebacks} if stock else set()
    others = [e for e in ours.tracebacks if not any(r in e for r in REFUSALS)]
    faults = [end for end in others if _kind(end) not in known]
    text = f"{len(faults)} tracebacks but for refused requests"
    return found("log", not faults, "; ".join([text, *sorted(set(faults))[:3]]))


def _kind(end: str) -> str:
    return end.partition(":")[0]


def _same_answers(ours: ArmRun, stock: ArmRun | None) -> Finding:
    """A wrong block anywhere in a probe's prompt changes its answer."""
    asked = [*ours.answers] if stock is None else [a | b for a, b in _pairs(ours, stock)]
    differing = sum(len(answers) > 1 for answers in asked)
    whose = "ours alone" if stock is None else "stock's too"
    text = (
        f"{differing} of {len(asked)} questions, asked all along, had different answers ({whose})"
    )
    return found("answers", not differing, text)


def _pairs(ours: ArmRun, stock: ArmRun) -> list[tuple[set[str], set[str]]]:
    return list(zip(ours.answers, stock.answers, strict=True))


def _worked(run: ArmRun) -> Finding:
    """A connector that did nothing would pass all the rest."""
    last = run.scrapes[-1][1] if run.scrapes else {}
    names = ("pins_started_total", "stores_total", "loads_total")
    did = {name: total(last, f"continuum:{name}") for name in names}
    text = ", ".join(f"{value:.0f} {name.split('_')[0]}" for name, value in did.items())
    return found("connector", all(did.values()), text)


def _ledger(run: ArmRun) -> Finding:
    if not run.scrapes or not run.alive:
        return Finding("ledger", Verdict.UNSEEN, "no server to ask")
    wrong = [*run.open_accounts, *(f"{name} = {value:g}" for name, value in run.held.items())]
    return found("ledger", not wrong, "; ".join(wrong) or "closed, and nothing held once idle")


# --- memory -------------------------------------------------------------------------------
def growth_of(run: ArmRun, role: str) -> Growth:
    """How one process of a run grew."""
    seen = [(sample.done, sample.rss[role]) for sample in run.samples if role in sample.rss]
    return growth([done for done, _ in seen], [size for _, size in seen])


def _memory(ours: ArmRun, stock: ArmRun | None) -> list[Finding]:
    if stock is None:
        return [Finding("memory", Verdict.UNSEEN, "no stock server to compare with")]
    return [compare(role, growth_of(ours, role), growth_of(stock, role)) for role in ROLES]


def compare(role: str, ours: Growth, stock: Growth) -> Finding:
    """Whether ours grew over the storm by more than MOST_EXCESS of stock's level beyond stock."""
    num = min(ours.requests, stock.requests)
    excess = (ours.slope - stock.slope) * num / 1000
    noise = (ours.noise + stock.noise) * num / 1000
    share = excess / stock.level if stock.level else 0.0
    wiggle = noise / stock.level if stock.level else 0.0
    text = (
        f"{ours.slope / 2**20:+.2f} MiB per 1,000 requests, stock {stock.slope / 2**20:+.2f}: "
        f"over {num:,} requests {share:+.1%} of stock's {stock.level / 2**20:.0f} MiB "
        f"(noise {wiggle:.1%})"
    )
    what = f"memory, {role}"
    if num < ENOUGH or wiggle > MOST_EXCESS:
        return Finding(what, Verdict.UNSEEN, text)
    return found(what, share <= MOST_EXCESS, text)


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
