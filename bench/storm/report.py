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
from bench.storm.judge import OUR_HITS, VLLM_HITS, Finding, Verdict, growth_of, hit_rate
from bench.storm.processes import ROLES
from bench.storm.slopes import sparkline

STYLES = {Verdict.OK: "", Verdict.WRONG: "red", Verdict.UNSEEN: "dim"}


def print_all(console: Console, runs: Sequence[ArmRun], findings: Sequence[Finding]) -> None:
    """The tables, and below them one line per finding."""
    console.print(_statuses(runs))
    console.print(_memory(runs))
    console.print(_hits(runs))
    for run in runs:
        for line in run.tally.unexpected:
            console.print(f"{run.name}: {line}", style="red", markup=False)
    console.print(_findings(findings))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _statuses(runs: Sequence[ArmRun]) -> Table:
    table = _table("Requests by how they ended", "", *(run.name for run in runs))
    for status in sorted({status for run in runs for status in run.tally.by_status}):
        table.add_row(status, *(str(run.tally.by_status.get(status, 0)) for run in runs))
    table.add_row("seconds", *(f"{run.wall_s:.0f}" for run in runs))
    table.add_row("tracebacks in the log", *(str(len(run.tracebacks)) for run in runs))
    return table


def _memory(runs: Sequence[ArmRun]) -> Table:
    columns = ("process", "server", "level", "per 1,000", "noise", "RSS over the storm")
    table = _table("RSS without mapped files, MiB; slope over the second half", *columns)
    for role in ROLES:
        for run in runs:
            sizes = [sample.rss[role] for sample in run.samples if role in sample.rss]
            if not sizes:
                continue
            grown = growth_of(run, role)
            cells = (grown.level, grown.slope, grown.noise)
            numbers = (f"{value / 2**20:.2f}" for value in cells)
            table.add_row(role, run.name, *numbers, sparkline(sizes))
    return table


def _hits(runs: Sequence[ArmRun]) -> Table:
    table = _table("Tokens found of tokens looked up", "server", "counted by", "early", "late")
    for run in runs:
        for by, counters in (("vLLM", VLLM_HITS), ("continuum", OUR_HITS)):
            rate = hit_rate(run, *counters)
            if rate.early or rate.late:
                table.add_row(run.name, by, f"{rate.early:.1%}", f"{rate.late:.1%}")
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="Findings", title_justify="left")
    for column in ("", "", ""):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = STYLES[finding.verdict]
        table.add_row(finding.verdict.value, finding.what, finding.text, style=style)
    return table


def as_json(force: Force, runs: Sequence[ArmRun], findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything, for --json."""
    return {
        "storm": asdict(force),
        "versions": {name: version(name) for name in ("vllm", "torch", "continuum-connector")},
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "findings": [{**asdict(each), "verdict": each.verdict.value} for each in findings],
        "servers": [run.as_json() for run in runs],
    }
