"""Log: every decision of a trace on one line, with what came of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from continuum_connector.analysis.report import seconds
from continuum_connector.analysis.source import Record, count, number, part, text, tiers

HEAD = (
    f"{'time':>9}  {'program':24} {'turn':>4} {'tokens':>8}  {'decided':20} "
    f"{'worth, next best':19} {'outcome':12} {'back after':>10}  {'in VRAM, DRAM, lost':>22}  saved"
)
NAME = 24  # characters of a program's name; ids differ at their ends
MAX_OPEN = 100_000  # decisions that wait for their outcome; beyond, the oldest is told as open

Pair = tuple[Record, Record | None]
Pending = OrderedDict[tuple[str, int], list[Record]]  # by program and turn: decision, outcome


def decisions(records: Iterable[Record]) -> Iterator[Pair]:
    """Each decision in its order, with its outcome; None where the trace has none."""
    pending: Pending = OrderedDict()
    for record in records:
        key = text(record, "program"), count(record, "turn")
        if record["event"] == "decision":
            yield from _told(pending, even_open=len(pending) >= MAX_OPEN)
            pending[key] = [record]
        elif record["event"] == "outcome" and len(pending.get(key, ())) == 1:
            pending[key].append(record)
            yield from _told(pending)
    while pending:
        yield from _told(pending, even_open=True)


def _told(pending: Pending, even_open: bool = False) -> Iterator[Pair]:
    """Take the oldest as long as their outcomes are known; `even_open`: the first in any case."""
    while pending:
        key, (decision, *outcome) = next(iter(pending.items()))
        if not outcome and not even_open:
            return
        even_open = False
        del pending[key]
        yield decision, outcome[0] if outcome else None


def as_line(decision: Record, outcome: Record | None, since: float) -> str:
    """The two as one line under HEAD; times in seconds after `since`."""
    name = text(decision, "program")
    name = name if len(name) <= NAME else "…" + name[1 - NAME :]
    gap_s = None if outcome is None else number(outcome, "gap_s")
    return (
        f"{decision['now'] - since:>8,.2f}s  {name:{NAME}} {count(decision, 'turn'):>4} "
        f"{count(decision, 'tokens'):>8,}  {_decided(decision):20} {_worth(decision):19} "
        f"{_outcome(outcome):12} {'' if gap_s is None else seconds(gap_s):>10}  "
        f"{_found(outcome):>22}  {_saved(outcome)}"
    ).rstrip()


def _decided(decision: Record) -> str:
    ttl_s = number(decision, "ttl_s")
    copy = ", copy" if text(decision, "then") == "store" else ""
    return text(decision, "decision") + (f" {seconds(ttl_s)}{copy}" if ttl_s is not None else "")


def _worth(decision: Record) -> str:
    """Of the best alternative and of the next, in seconds to all programs."""
    worths = sorted((w for w in part(decision, "values").values() if _is_number(w)), reverse=True)
    return ", ".join(seconds(each) for each in worths[:2]) if any(worths) else ""


def _is_number(value: object) -> bool:
    return number({"value": value}, "value") is not None


def _outcome(outcome: Record | None) -> str:
    return "(open)" if outcome is None else text(outcome, "outcome").replace("_", " ")


def _found(outcome: Record | None) -> str:
    if outcome is None or "hit_tokens" not in outcome:
        return ""
    vram, dram = tiers(outcome)
    return f"{vram:,}, {dram:,}, {count(outcome, 'recomputed_tokens'):,}"


def _saved(outcome: Record | None) -> str:
    saved_s = None if outcome is None else number(outcome, "saved_s")
    return seconds(saved_s) if saved_s else ""
