"""What the frozen lab says of a change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("tomllib")  # Python 3.11

from bench.sim import frozen
from bench.sim.cells import load_matrix
from bench.sim.frozen import ARMS, SEEDS, Frozen, Run, compare, read, run_of, taken, told, write
from bench.sim.job import Result
from bench.sim.matrix import arms_of, job
from bench.tests.test_sim_matrix import record
from continuum_connector.errors import ToldError

CELL = load_matrix().cells[0]


def test_every_cell_is_frozen_with_every_arm_and_seed() -> None:
    asked = {
        f"{cell.name}: {arm}, {seed}"
        for cell in load_matrix().cells
        for arm in arms_of(cell, ARMS.split(","))
        for seed in SEEDS.split(",")
    }
    assert set(read().runs) == asked


def test_one_digit_is_a_move_and_what_nobody_sees_is_none() -> None:
    one = Result(job(CELL, "adaptive", 1), record("adaptive", [10.0]))
    before = Frozen({"vllm": "x"}, taken([one]))
    assert one.record is not None
    slower = msgspec.structs.replace(one.record, wall_s=99.0, note="said otherwise")
    assert not list(compare(before, taken([msgspec.structs.replace(one, record=slower)])))
    copied = msgspec.structs.replace(one.record, stored_bytes=one.record.stored_bytes + 1)
    (moved,) = compare(before, taken([msgspec.structs.replace(one, record=copied)]))
    assert moved.ratio == 1.0
    assert "1 of 1 runs moved" in told([moved], 1, before.versions)


def test_the_largest_change_stands_first_and_a_new_run_is_said_to_be_new() -> None:
    was = Frozen(
        {"vllm": "x"}, {"a: adaptive, 1": Run(10.0, "1"), "b: adaptive, 1": Run(10.0, "1")}
    )
    now = {name: Run(s, "2") for name, s in (("a: adaptive, 1", 10.1), ("b: adaptive, 1", 5.0))}
    moved = [*compare(was, now), *compare(was, {"c: adaptive, 1": Run(1.0, "3")})]
    lines = [line for line in told(moved, 3, was.versions).splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[1:]] == [
        "| c: adaptive, 1",
        "| b: adaptive, 1",
        "| a: adaptive, 1",
    ]
    assert lines[1].endswith("| new |")
    assert "adaptive 0.7550 in 2" in told(moved, 3, was.versions)


def test_equal_runs_are_one_sentence() -> None:
    assert told([], 7, {"vllm": "x"}).startswith("7 runs are equal to the last digit")


def test_some_runs_can_be_frozen_anew(tmp_path: Path) -> None:
    path = tmp_path / "frozen.json"
    write({"a": Run(1.0, "1"), "b": Run(2.0, "2")}, path)
    write({"b": Run(3.0, "3")}, path)
    assert read(path).runs == {"a": Run(1.0, "1"), "b": Run(3.0, "3")}


def test_another_vllm_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "frozen.json"
    write({"a": Run(1.0, "1")}, path)
    monkeypatch.setattr(frozen, "versions", lambda: {"vllm": "99.0"})
    with pytest.raises(ToldError, match=r"is of vLLM .* and here is 99\.0"):
        read(path)


def test_a_run_is_told_by_all_but_its_turns_and_its_time() -> None:
    assert run_of(record("adaptive", [10.0])) == run_of(
        msgspec.structs.replace(record("adaptive", [10.0]), wall_s=3.0)
    )
    assert run_of(record("adaptive", [10.0])) != run_of(record("adaptive", [10.0001]))
