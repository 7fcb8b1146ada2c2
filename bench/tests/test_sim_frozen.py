"""What the frozen lab says of a change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("tomllib")  # Python 3.11

from bench.sim import frozen
from bench.sim.cells import load_matrix
from bench.sim.frozen import ARMS, SEEDS, Frozen, Run, compare, read, taken, write
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
    assert not compare(before, taken([msgspec.structs.replace(one, record=slower)]))
    copied = msgspec.structs.replace(one.record, stored_bytes=one.record.stored_bytes + 1)
    (moved,) = compare(before, taken([msgspec.structs.replace(one, record=copied)]))
    assert moved == (f"{CELL.name}: adaptive, 1", "10", "10", "1.0000")


def test_the_largest_change_stands_first_and_a_new_run_is_said_to_be_new() -> None:
    was = Frozen({"vllm": "x"}, {"a": Run(10.0, "1"), "b": Run(10.0, "1"), "same": Run(1.0, "1")})
    now = {"same": Run(1.0, "1"), "a": Run(10.1, "2"), "b": Run(5.0, "2"), "c": Run(1.0, "3")}
    assert compare(was, now) == [
        ("c", "-", "1", "new"),
        ("b", "10", "5", "0.5000"),
        ("a", "10", "10.1", "1.0100"),
    ]


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
