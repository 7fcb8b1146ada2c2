"""Results in numbers: what one arm did at one point, all seeds together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.common.tables import mean
from bench.sim.arms.oracles import ORACLES
from bench.sim.job import Job, Result
from bench.sim.result import RunRecord, TurnRecord

LOAD = "rate"  # the parameter that a sweep goes along


@dataclass(frozen=True)
class Point:
    """What arms are compared on: a scene (everything but load), and the load."""

    scene: str
    load: float | None

    @property
    def title(self) -> str:
        return self.scene if self.load is None else f"{self.scene}, {self.load:g} programs/s"


@dataclass
class Figures:
    """One arm at one point. Lists are over all seeds, in the order of the records."""

    arm: str
    records: list[RunRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.jct_s = sorted(each for record in self.records for each in record.jct_s.values())
        self.turns = [turn for record in self.records for turn in record.turns]
        self.ttft_s = sorted(turn.first_token - turn.arrived for turn in self.turns)

    def total(self, name: str) -> float:
        """Sum of a field over the seeds."""
        return float(sum(getattr(record, name) for record in self.records))

    @property
    def jct_of_seeds(self) -> list[float]:
        """The mean of each seed."""
        return [mean(list(record.jct_s.values())) for record in self.records]

    def share(self, name: str) -> float:
        """Tokens of that kind, per prompt token."""
        prompt = self.total("num_prompt_tokens")
        return self.total(name) / prompt if prompt else 0.0

    @property
    def miss_share(self) -> float:
        """Prompt tokens found in no tier, per prompt token."""
        found = self.share("num_local_tokens") + self.share("num_external_tokens")
        return max(0.0, 1.0 - found)

    @property
    def tier_shares(self) -> dict[str, float]:
        """Per prompt token, by where it was found."""
        vram, dram = self.share("num_local_tokens"), self.share("num_external_tokens")
        return {"VRAM": vram, "DRAM": dram, "computed": self.miss_share}

    @property
    def read_back(self) -> float:
        """Bytes loaded per byte stored; NaN if nothing was stored."""
        stored = self.total("stored_bytes")
        return self.total("loaded_bytes") / stored if stored else math.nan

    @property
    def busy(self) -> float:
        """Share of the time in which the GPU computed."""
        span = self.total("span_s")
        return self.total("busy_s") / span if span else 0.0

    def turn_latency_s(self) -> list[float]:
        """Mean seconds from arrival to answer, by the turn's index."""
        by_index: dict[int, list[float]] = {}
        for turn in self.turns:
            by_index.setdefault(turn.index, []).append(_latency(turn))
        return [mean(by_index[index]) for index in sorted(by_index)]


def _latency(turn: TurnRecord) -> float:
    return turn.finished - turn.arrived


Table = dict[Point, dict[str, Figures]]


def table(results: Iterable[Result]) -> Table:
    """Group what is done: by point, loads ascending, then by arm, both as first seen."""
    found: dict[Point, dict[str, list[RunRecord]]] = {}
    for result in results:
        if result.record is not None:
            arms = found.setdefault(point(result.job), {})
            arms.setdefault(result.job.arm, []).append(result.record)
    scenes = list(dict.fromkeys(each.scene for each in found))
    order = sorted(found, key=lambda p: (scenes.index(p.scene), p.load or 0.0))
    return {each: {arm: Figures(arm, runs) for arm, runs in found[each].items()} for each in order}


def point(job: Job) -> Point:
    """Where a job belongs: its seed and its arm do not matter."""
    if isinstance(cell := job.params.get("cell"), str):  # of the matrix: its name says it all
        return Point(cell, None)
    load = job.params.get(LOAD)
    told = {key: value for key, value in job.params.items() if key != LOAD}
    parts = [
        machine_words(job.machine),
        job.workload,
        *(f"{k} {_word(v)}" for k, v in told.items()),
    ]
    scene = ", ".join(part for part in parts if part)
    return Point(scene, float(load) if isinstance(load, int | float) else None)


def machine_words(machine: dict[str, Any]) -> str:
    """A machine as people say it; what it does not name is left out."""
    words = {
        "gpu": "{}",
        "model": "{}",
        "tp": "TP {}",
        "dram_gb": "{} GB DRAM",
        "pcie_gb_s": "PCIe {} GB/s",
        "disk_gb": "disk of {} GB",
        "disk_gb_s": "which reads {} GB/s",
        "kv_tokens": "{} tokens of KV",
        "block_size": "blocks of {}",
    }
    known = [
        (words.get(key, key + " {}"), machine[key]) for key in (*words, *machine) if key in machine
    ]
    return ", ".join(dict.fromkeys(text.format(_word(v)) for text, v in known if v is not None))


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def arm_names(table: Table) -> list[str]:
    """Every arm, once, as first seen."""
    return list(dict.fromkeys(arm for arms in table.values() for arm in arms))


def oracle_of(arms: Iterable[str]) -> str:
    """The yardstick among the arms, the first oracle of the registry; "" if there is none."""
    names = set(arms)
    return next((arm.name for arm in ORACLES if arm.name in names), "")
