"""The storm on paper: a table on the terminal, and all of it as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.storm.agents import Force
from bench.storm.arm import ArmRun
from bench.storm.judge import OUR_HITS, VLLM_HITS, Finding, Verdict, hit_rate

STYLES = {Verdict.OK: "", Verdict.WRONG: "red", Verdict.UNSEEN: "dim"}


def print_all(console: Console, run: ArmRun, findings: Sequence[Finding]) -> None:
    """The tables, and below them one line per finding."""
    statuses = _table("Requests by how they ended", "", "")
    for status, number in sorted(run.tally.by_status.items()):
        statuses.add_row(status, str(number))
    statuses.add_row("seconds", f"{run.wall_s:.0f}")
    console.print(statuses)
    hits = _table("Tokens found of tokens looked up", "counted by", "early", "late")
    for by, counters in (("vLLM", VLLM_HITS), ("continuum", OUR_HITS)):
        rate = hit_rate(run, *counters)
        hits.add_row(by, f"{rate.early:.1%}", f"{rate.late:.1%}")
    console.print(hits)
    for line in run.tally.unexpected:
        console.print(line, style="red", markup=False)
    console.print(_findings(findings))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="Findings", title_justify="left")
    for column in ("", "", ""):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = STYLES[finding.verdict]
        table.add_row(finding.verdict.value, finding.what, finding.text, style=style)
    return table


def as_json(force: Force, run: ArmRun, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything, for --json."""
    return {
        "storm": asdict(force),
        "versions": {name: version(name) for name in ("vllm", "torch", "continuum-connector")},
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "findings": [{**asdict(each), "verdict": each.verdict.value} for each in findings],
        "servers": [run.as_json()],
    }
