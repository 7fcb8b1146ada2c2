"""What an arm measured, and the one table that compares the arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench.chat.agents import ProgramRecord, TurnRecord
from bench.serve.averages import mean, p95
from bench.serve.metrics import Metrics, by_label, total

NONE = "-"


@dataclass
class ArmResult:
    """One server, one run of the workload: what clients saw, and what the server counted."""

    label: str
    connector: bool
    programs: list[ProgramRecord]
    counters: Metrics  # what the run added to the server's counters
    wall_s: float
    start_s: float

    @property
    def turns(self) -> list[TurnRecord]:
        """All turns of all programs."""
        return [turn for program in self.programs for turn in program.turns]

    @property
    def errors(self) -> list[str]:
        """Every failed turn, as its client saw it."""
        return [f"{t.program} turn {t.index}: {t.error}" for t in self.turns if t.error]

    @property
    def jct_s(self) -> list[float]:
        """Completion times of the programs that completed."""
        return [program.jct_s for program in self.programs if not program.failed]

    @property
    def ttft_s(self) -> list[float]:
        """Times to first token of the turns that answered."""
        return [turn.ttft_s for turn in self.turns if not turn.error]

    def ttft_of_turns_s(self, first: bool) -> list[float]:
        """The same, of first turns or of later ones: program order may trade one for the other."""
        return [t.ttft_s for t in self.turns if not t.error and (t.index == 0) == first]

    def count(self, name: str, **labels: str) -> float:
        """Sum of what was added to a counter."""
        return total(self.counters, name, **labels)

    def pins(self) -> dict[str, float]:
        """Pins by how they ended."""
        ended = by_label(self.counters, "continuum:pins_ended_total", "cause")
        return {cause: n for cause, n in sorted(ended.items(), key=lambda c: -c[1]) if n}

    def as_json(self) -> dict[str, Any]:
        """Everything, for --json."""
        return {
            "label": self.label,
            "wall_s": self.wall_s,
            "server_start_s": self.start_s,
            "summary": {row.key: row.value(self) for row in ROWS},
            "pins_ended": self.pins(),
            "programs": [asdict(program) for program in self.programs],
            "counters": [
                {"name": name, "labels": dict(labels), "added": value}
                for (name, labels), value in sorted(self.counters.items(), key=str)
                if value and not name.endswith(("_created", "_bucket"))
            ],
        }


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` says whether comparing it with the baseline makes sense."""

    key: str
    title: str
    value: Callable[[ArmResult], float]
    unit: str = ""
    ratio: bool = True


PROMPT = "vllm:prompt_tokens_by_source_total"
ROWS = (
    Row("jct_mean_s", "JCT mean", lambda a: mean(a.jct_s), "s"),
    Row("jct_p95_s", "JCT P95", lambda a: p95(a.jct_s), "s"),
    Row("ttft_mean_s", "TTFT mean", lambda a: mean(a.ttft_s), "s"),
    Row("ttft_p95_s", "TTFT P95", lambda a: p95(a.ttft_s), "s"),
    Row("ttft_first_mean_s", "  first turns, mean", lambda a: mean(a.ttft_of_turns_s(True)), "s"),
    Row("ttft_later_mean_s", "  later turns, mean", lambda a: mean(a.ttft_of_turns_s(False)), "s"),
    Row("prompt_tokens", "prompt tokens", lambda a: a.count("vllm:prompt_tokens_total")),
    Row("recomputed", "  computed", lambda a: a.count(PROMPT, source="local_compute")),
    Row("hits_vram", "  hit in VRAM", lambda a: a.count(PROMPT, source="local_cache_hit")),
    Row(
        "hits_dram",
        "  hit in DRAM",
        lambda a: a.count(PROMPT, source="external_kv_transfer"),
        ratio=False,
    ),
    Row("preemptions", "preemptions", lambda a: a.count("vllm:num_preemptions_total"), ratio=False),
    Row("errors", "failed turns", lambda a: len(a.errors), ratio=False),
)


def make_table(title: str, arms: Sequence[ArmResult]) -> Table:
    """One column per arm, and how each compares with the first."""
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for index, arm in enumerate(arms):
        table.add_column(arm.label, justify="right", overflow="fold")
        if index:
            table.add_column("ratio", justify="right", style="bold")
    base = arms[0]
    for row in ROWS:
        cells = []
        for index, arm in enumerate(arms):
            cells.append(_number(row.value(arm), row.unit))
            if index:
                cells.append(_ratio(row.value(arm), row.value(base)) if row.ratio else "")
        table.add_row(row.title, *cells)
    for title, text in (("pins, by how they ended", _pins), ("same outputs", _outputs)):
        cells = []
        for index, arm in enumerate(arms):
            cells.append(text(arm, base))
            if index:
                cells.append("")
        table.add_row(title, *cells)
    return table


def same_outputs(arm: ArmResult, base: ArmResult) -> tuple[int, int]:
    """Turns answered alike, of the turns the two arms have between them."""
    mine = {(t.program, t.index): t.answer for t in arm.turns if not t.error}
    theirs = {(t.program, t.index): t.answer for t in base.turns if not t.error}
    return sum(mine.get(key) == answer for key, answer in theirs.items()), len(mine | theirs)


def _outputs(arm: ArmResult, base: ArmResult) -> str:
    if arm is base:
        return NONE
    same, of = same_outputs(arm, base)
    return f"yes ({same}/{of})" if same == of else f"NO ({same}/{of})"


def _pins(arm: ArmResult, _base: ArmResult) -> str:
    if not arm.connector:
        return NONE
    return "\n".join(f"{cause} {n:.0f}" for cause, n in arm.pins().items()) or "none"


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return NONE
    return f"{value:.2f} {unit}" if unit else f"{value:,.0f}"


def _ratio(value: float, base: float) -> str:
    if math.isnan(value) or math.isnan(base) or not base:
        return ""
    return f"{value / base:.2f}x"
