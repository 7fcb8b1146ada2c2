"""Report: a Summary as rows of words and numbers, the same rows for every trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from continuum_connector.tools.analysis.summary import Sample, Summary, Tokens, policy_of

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))
DECISIONS = ("pin", "offload", "free")


# Why a turn did not get from the disk what the disk had.
NOT_READ = {
    "prefill": "a prefill is cheaper",
    "room": "DRAM had no room",
    "deadline": "its deadline passed",
    "failed": "a read failed",
    "cleared": "the tier was reset or went down meanwhile",
    "stuck": "the disk owed an answer for too long",
    "down": "there was no disk",
    "unsaved": "blocks left DRAM before they were written",
    "budget": "the write budget did not allow blocks to be written",
}


class Row(NamedTuple):
    """One number. `unit`: "s", "%" (for a share from 0 to 1), "bytes", or "" for a count."""

    group: str
    name: str
    value: float | str | None
    unit: str = ""

    @property
    def cell(self) -> str:
        """The value as text; "-" if there is none."""
        if self.value is None:
            return "-"
        if isinstance(self.value, str):
            return self.value
        if self.unit == "%":
            return f"{100 * self.value:.1f} %"
        if self.unit == "s":
            return seconds(self.value)
        return size(self.value) if self.unit == "bytes" else f"{self.value:,.0f}"


def seconds(value: float) -> str:
    """Seconds as text, to three digits if three are enough."""
    if value and abs(value) < 0.01:
        return f"{1000 * value:.3g} ms"
    return f"{value:,.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB"


def rows(summary: Summary, num_bad: int = 0) -> list[Row]:
    """Every row, in reading order."""
    return [
        *_what(summary, num_bad),
        *_times(summary),
        *_tokens("all prompts", summary.prompts),
        *_tokens("returning turns", summary.returning, saves=True),
        *_decisions(summary),
        *_pins(summary),
        *_copies(summary),
        *_hindsight(summary),
    ]


def as_dict(found: list[Row]) -> dict[str, dict[str, Any]]:
    """The rows for a program to read: group -> name -> value, in seconds, shares, bytes and
    counts."""
    groups: dict[str, dict[str, Any]] = {}
    for row in found:
        groups.setdefault(row.group, {})[row.name] = row.value
    return groups


def _what(summary: Summary, num_bad: int) -> Iterator[Row]:
    group = "trace"
    yield Row(group, "policy", policy_of(summary))
    yield Row(group, "programs", summary.num_programs)
    yield Row(group, "requests of nobody", summary.num_single)
    yield Row(group, "turns", sum(summary.decisions.values()))
    wall = None
    if summary.first is not None and summary.last is not None:
        wall = summary.last - summary.first
    yield Row(group, "wall time", wall, "s")
    yield Row(group, "preemptions", summary.num_preempted)
    yield Row(group, "lines skipped", num_bad)


def _times(summary: Summary) -> Iterator[Row]:
    yield Row("JCT", "programs", summary.jct.num)
    yield from _spread("JCT", summary.jct)
    yield Row("JCT", "min", summary.jct.quantile(0.0), "s")
    yield Row("JCT", "max", summary.jct.quantile(1.0), "s")
    yield from _spread("turn", summary.latency)
    yield from _spread("queueing", summary.waited)


def _spread(group: str, sample: Sample) -> Iterator[Row]:
    yield Row(group, "mean", sample.mean, "s")
    for name, q in QUANTILES:
        yield Row(group, name, sample.quantile(q), "s")


def _tokens(group: str, tokens: Tokens, saves: bool = False) -> Iterator[Row]:
    yield Row(group, "tokens", tokens.num)
    yield Row(group, "hit ratio, VRAM", _share(tokens.vram, tokens.num), "%")
    yield Row(group, "hit ratio, DRAM", _share(tokens.dram, tokens.num), "%")
    if tokens.disk:
        yield Row(group, "hit ratio, disk", _share(tokens.disk, tokens.num), "%")
    if tokens.is_against_stock:
        yield Row(group, "only we kept", _share(tokens.only_ours, tokens.num), "%")
        yield Row(group, "stock would have kept too", _share(tokens.stock_too, tokens.num), "%")
        yield Row(group, "only stock would have kept", _share(tokens.only_stock, tokens.num), "%")
    if saves:
        yield Row(group, "save ratio", _share(tokens.saved, tokens.had), "%")


def _decisions(summary: Summary) -> Iterator[Row]:
    for decision in sorted({*DECISIONS, *summary.decisions}, key=_order):
        yield Row("decisions", decision, summary.decisions[decision])
    for outcome, num in sorted(summary.outcomes.items(), key=lambda item: _order(item[0])):
        yield Row("outcomes", outcome, num)
    if summary.outcomes:
        yield Row("outcomes", "prefill saved, estimated", summary.saved_s, "s")
        yield Row("outcomes", "prefill repeated, estimated", summary.lost_s, "s")


def _order(name: str) -> tuple[int, str]:
    first = name.split(" ")[0]
    return (DECISIONS.index(first) if first in DECISIONS else len(DECISIONS), name)


def _pins(summary: Summary) -> Iterator[Row]:
    group = "pins ended"
    for cause, num in sorted(summary.pin_causes.items()):
        yield Row(group, cause, num)
    if summary.pin_causes:
        total = sum(summary.block_seconds.values())
        yield Row(group, "held, mean", summary.held_s.mean, "s")
        yield Row(group, "block-seconds", total or None)
        used = summary.block_seconds["returned"]
        yield Row(group, "of them until a return", _share(used, total), "%")


def _copies(summary: Summary) -> Iterator[Row]:
    yield from _both_ways(summary, "DRAM", ("store", "stored"), ("load", "loaded"))
    if {"write", "read"} & {*summary.blocks, *summary.num_failed}:
        yield from _both_ways(summary, "disk", ("write", "written"), ("read", "read"))
    for why, num in sorted(summary.not_read.items()):
        yield Row("disk", f"turns, not read as {NOT_READ.get(why, why)}", num)
        yield Row("disk", f"tokens, not read as {NOT_READ.get(why, why)}", summary.left_there[why])


def _both_ways(
    summary: Summary, group: str, out: tuple[str, str], back: tuple[str, str]
) -> Iterator[Row]:
    """Rows on the copies to a tier and back."""
    blocks, num_bytes = summary.blocks, summary.bytes
    for direction, verb in (out, back):
        yield Row(group, f"blocks {verb}", blocks[direction])
    yield Row(group, "read back", _share(blocks[back[0]], blocks[out[0]]), "%")
    for (direction, _), name in ((out, "bytes out"), (back, "bytes in")):
        is_known = num_bytes[direction] or not blocks[direction]
        yield Row(group, name, num_bytes[direction] if is_known else None, "bytes")
    num_failed = sum(summary.num_failed[direction] for direction, _ in (out, back))
    yield Row(group, "transfers not done", num_failed)


def _hindsight(summary: Summary) -> Iterator[Row]:
    group, regrets = "regret", summary.regrets
    num = regrets.num
    yield Row(group, "decisions judged", num)
    yield Row(group, "not judged", regrets.num_open)
    right = sum(n for (chosen, best), n in regrets.best.items() if chosen == best)
    yield Row(group, "best kind chosen", _share(right, num), "%")
    yield Row(group, "per decision", _share(regrets.total_s, num), "s")
    yield Row(group, "in all", regrets.total_s if num else None, "s")
    for decision in DECISIONS:
        if (sample := regrets.by_decision.get(decision)) is not None:
            yield Row(group, f"per {decision}", sample.mean, "s")
    calibration = summary.calibration
    yield Row("calibration", "predictions judged", calibration.num)
    yield Row("calibration", "not judged", calibration.num_open)
    yield Row("calibration", "mean error", calibration.error, "%")


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
