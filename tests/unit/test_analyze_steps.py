"""The engine's steps in `continuum analyze`: plotted. Other commands pass over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import Summary
from continuum_connector.tools.cli import analyze as command
from tests.unit.test_explain import run, small, write


def step(now: float, free: float, waiting: float = 0, hook_s: float = 1e-4, **more: Any) -> Any:
    record = {"t": 1.7e9 + now, "now": now, "event": "steps", "steps": 2, "free_blocks": free}
    record |= {"pinned_blocks": 10, "waiting": waiting, "running": 4, "store_blocks": 0}
    return record | {"load_blocks": 0, "hook_s": 2 * hook_s, "hook_max_s": hook_s} | more


def by_hand() -> list[Any]:
    """Blocks run out, turns queue, and the queue is over after a pause of 4 s."""
    return [
        step(10.0, 80),
        step(11.0, 40, 1, pinned_blocks=30),
        step(12.0, 0, 9, 1e-3, store_blocks=64),
        step(13.0, 8, 9),
        step(17.9, 80),
        step(18.0, 60),
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", [*small()[:5], *by_hand(), *small()[5:]])


def test_a_column_has_the_worst_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = Summary()
    for each in by_hand():
        summary.add(each)
    monkeypatch.setattr(command, "WIDTH", 4)
    assert command.moments(summary, "free_blocks") == [40, 0, None, 60]
    assert command.moments(summary, "waiting") == [1, 9, None, 0]


def test_the_plot_fits_80_columns(trace: Path) -> None:
    lines = run("analyze", str(trace), columns=80).output.splitlines()
    assert max(map(len, lines)) <= 80
    (at,) = (i for i, line in enumerate(lines) if line.startswith("Steps: trace.jsonl, 8 s"))
    plot = [line.rstrip() for line in lines[at + 1 : at + 13]]
    assert plot[0].split() == ["free", "blocks", "80", "█", "▁", "▄"]
    bars = plot[1].removeprefix("free blocks").strip().removeprefix("0").strip()
    assert len(bars) == 48
    assert [i for i, bar in enumerate(bars) if bar != " "] == [0, 6, 12, 18, 47]
    assert bars.replace(" ", "") == "██▁▃█", "0 is not as if there was no step"
    named = {line[:16].strip() for line in plot[::2]}
    assert named == {
        *("free blocks", "pinned blocks", "waiting", "running", "blocks to DRAM"),
        "hooks, one step",
    }, "no blocks came from DRAM"


def test_without_steps_all_is_as_before(tmp_path: Path, trace: Path) -> None:
    old = write(tmp_path / "old.jsonl", small())
    before, with_steps = (run("analyze", str(path)).output for path in (old, trace))
    assert "steps" not in before.lower()
    assert "Steps: " in with_steps
    both = run("analyze", str(old), str(trace))
    assert both.exit_code == 0, both.output
    assert both.output.count("Steps: ") == 1


@pytest.mark.parametrize(
    "odd",
    [
        step(10.5, -5, -1, -1.0),
        step(1e14, 1e14, 1e14, 1e14),
        step(-1e14, 1),
        step(10.5, 1, steps=0),
        step(10.5, 1, steps="many"),
        {"event": "steps", "now": 10.5},
        {"event": "steps", "now": 10.5, "steps": 1, "free_blocks": [], "hook_max_s": {}},
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_odd_records_are_survived(tmp_path: Path, odd: Any, alone: bool) -> None:
    path = write(tmp_path / "t", [*([] if alone else by_hand()), odd])
    done = run("analyze", str(path), columns=80)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_line_cut_short_is_skipped_and_counted(trace: Path) -> None:
    with trace.open("a") as file:
        file.write(json.dumps(step(19.0, 1))[:70])
    source = Source(trace)
    assert len(command.summarize(source).steps["now"]) == 6
    assert source.num_bad == 1


def test_other_commands_tell_what_they_tell_without_steps(tmp_path: Path, trace: Path) -> None:
    old = write(tmp_path / "old.jsonl", small())
    for words in (["explain", "job:p", "--trace"], ["explain", "--trace"]):
        told = [run(*words, str(path)) for path in (old, trace)]
        assert told[0].exit_code == told[1].exit_code == 0
        assert told[0].output == told[1].output
    made = []
    for path in (old, trace):
        out = path.with_suffix(".json")
        assert run("convert", str(path), "--out", str(out)).exit_code == 0
        made.append(out.read_text())
    assert made[0] == made[1]
