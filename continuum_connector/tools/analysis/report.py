"""Report: a Summary as rows of words and numbers, the same rows for every trace."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from continuum_connector.tools.analysis.source import text
from continuum_connector.tools.analysis.summary import Sample, Summary

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
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

Value = float | str | None
Part = tuple[str, str, Mapping[str, Value]]  # rows of a group that have one unit


class Row(NamedTuple):
    """One number. `unit`: "s", "%" (for a share from 0 to 1), "bytes", or "" for a count."""

    group: str
    name: str
    value: Value
    unit: str

    @property
    def cell(self) -> str:
        """The value as text; "-" if there is none."""
        if self.value is None or isinstance(self.value, str):
            return self.value or "-"
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
    parts = (_times(summary, num_bad), _decided(summary), _copies(summary), _judged(summary))
    return [
        Row(group, name, value, unit)
        for group, unit, values in itertools.chain(*parts)
        for name, value in values.items()
    ]


def as_dict(found: list[Row]) -> dict[str, dict[str, Any]]:
    """The rows for a program to read: group -> name -> value, in seconds, shares, bytes and
    counts."""
    groups: dict[str, dict[str, Any]] = {}
    for row in found:
        groups.setdefault(row.group, {})[row.name] = row.value
    return groups


def _times(of: Summary, num_bad: int) -> Iterator[Part]:
    policies = dict.fromkeys(text(start, "policy") or "unknown" for start in of.starts)
    wall = None if of.first is None or of.last is None else of.last - of.first
    num = {"programs": of.num_programs, "requests of nobody": of.num_single}
    policy: dict[str, Value] = {"policy": ", ".join(policies) or "unknown"}
    yield "trace", "", policy | num | {"turns": sum(of.decisions.values())}
    yield "trace", "s", {"wall time": wall}
    yield "trace", "", {"preemptions": of.num_preempted, "lines skipped": num_bad}
    yield "JCT", "", {"programs": of.jct.num}
    yield "JCT", "s", _spread(of.jct, min=0.0, max=1.0)
    yield "turn", "s", _spread(of.latency)
    yield "queueing", "s", _spread(of.waited)
    for group, tokens in (("all prompts", of.prompts), ("returning turns", of.returning)):
        yield group, "", {"tokens": tokens["tokens"]}
        yield group, "%", _shares(tokens)
    yield "returning turns", "%", {"save ratio": _share(of.returning["saved"], of.returning["had"])}


def _spread(sample: Sample, **more: float) -> dict[str, Value]:
    quantiles = {**QUANTILES, **more}
    return {"mean": sample.mean, **{name: sample.quantile(q) for name, q in quantiles.items()}}


def _shares(tokens: Counter[str]) -> dict[str, Value]:
    names = {"vram": "hit ratio, VRAM", "dram": "hit ratio, DRAM"}
    if tokens["disk"]:
        names["disk"] = "hit ratio, disk"
    if tokens["told"]:
        names |= {"only_ours": "only we kept", "stock_too": "stock would have kept too"}
        names["only_stock"] = "only stock would have kept"
    return {name: _share(tokens[of], tokens["tokens"]) for of, name in names.items()}


def _decided(of: Summary) -> Iterator[Part]:
    def order(name: str) -> tuple[int, str]:
        kind = name.split(" ")[0]
        return (DECISIONS.index(kind) if kind in DECISIONS else len(DECISIONS), name)

    kinds = sorted({*DECISIONS, *of.decisions}, key=order)
    yield "decisions", "", {kind: of.decisions[kind] for kind in kinds}
    if of.outcomes:
        yield "outcomes", "", {name: of.outcomes[name] for name in sorted(of.outcomes, key=order)}
        saved = {"prefill saved, estimated": of.saved_s, "prefill repeated, estimated": of.lost_s}
        yield "outcomes", "s", saved
    if of.pin_causes:
        group, total = "pins ended", sum(of.block_seconds.values())
        yield group, "", dict(sorted(of.pin_causes.items()))
        yield group, "s", {"held, mean": of.held_s.mean}
        yield group, "", {"block-seconds": total or None}
        yield group, "%", {"of them until a return": _share(of.block_seconds["returned"], total)}


def _copies(of: Summary) -> Iterator[Part]:
    """Rows on the copies to each tier and back."""
    tiers = [("DRAM", ("store", "stored"), ("load", "loaded"))]
    if {"write", "read"} & {*of.blocks, *of.num_failed}:
        tiers.append(("disk", ("write", "written"), ("read", "read")))
    for group, (out, stored), (back, loaded) in tiers:
        num_out, num_back = of.blocks[out], of.blocks[back]
        yield group, "", {f"blocks {stored}": num_out, f"blocks {loaded}": num_back}
        yield group, "%", {"read back": _share(num_back, num_out)}
        for way, name in ((out, "bytes out"), (back, "bytes in")):
            is_known = of.bytes[way] or not of.blocks[way]
            yield group, "bytes", {name: of.bytes[way] if is_known else None}
        yield group, "", {"transfers not done": of.num_failed[out] + of.num_failed[back]}
    for why, num in sorted(of.not_read.items()):
        name = f"not read as {NOT_READ.get(why, why)}"
        yield "disk", "", {f"turns, {name}": num, f"tokens, {name}": of.left_there[why]}


def _judged(of: Summary) -> Iterator[Part]:
    regrets, num, calibration = of.regrets, of.regrets.num, of.calibration
    right = sum(n for (chosen, best), n in regrets.best.items() if chosen == best)
    yield "regret", "", {"decisions judged": num, "not judged": regrets.num_open}
    yield "regret", "%", {"best kind chosen": _share(right, num)}
    per = {f"per {d}": regrets.by_decision[d].mean for d in DECISIONS if d in regrets.by_decision}
    total_s = regrets.total_s if num else None
    yield "regret", "s", {"per decision": _share(regrets.total_s, num), "in all": total_s, **per}
    judged = {"predictions judged": calibration.num, "not judged": calibration.num_open}
    yield "calibration", "", judged
    yield "calibration", "%", {"mean error": calibration.error}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
