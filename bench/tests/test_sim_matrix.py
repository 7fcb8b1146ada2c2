"""The scenario matrix: its cells, and how they are judged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("tomllib")  # Python 3.11

from bench.sim import pair
from bench.sim.cells import Cell, cell_of, load_matrix, scene
from bench.sim.hardware import GB, PUBLISHED_KV_TOKENS
from bench.sim.job import Job, Result, RunRecord
from bench.sim.load import demand
from bench.sim.matrix import PAGE, arms_of, job, judge
from bench.sim.store import Store
from bench.sim.verdict import Verdict, origin, page, verdict
from bench.sim.workloads.made_up import eight_turns
from continuum_connector.errors import ToldError

MATRIX = load_matrix()
CELLS = {cell.name: cell for cell in MATRIX.cells}
ORIGIN = origin("command", (1, 2), ("stock", "adaptive", "lru_offload"), "c0de", {})


def record(arm: str, jct_s: list[float]) -> RunRecord:
    named = {f"p{i}": seconds for i, seconds in enumerate(jct_s)}
    return RunRecord(arm, "w", "H100", 1, named, [], *(0,) * 4, 0.0, 0.0, 0, 0, 0.9, 1.0, 0.0)


def judged(aim: str = "best", **means: float) -> Verdict:
    """A verdict on arms that took so long."""
    named = {name.replace("_", "+"): {1: record(name, [s])} for name, s in means.items()}
    return verdict(Cell("a cell", {}, aim=aim), named)


# one of each that is scaled
KINDS = {cell.workload: cell.name for cell in CELLS.values() if "load" in cell.said}


@pytest.mark.parametrize(
    "name",
    ["fast/none", "fast/over", "hybrid/mtp", "person/dram 2", "coding/disk 3", *KINDS.values()],
)
def test_a_cell_asks_what_it_says(name: str) -> None:
    made = scene(CELLS[name], seed=1)
    said = CELLS[name].said
    asked = demand(made.workload, made.machine)
    assert asked.work_s / made.window_s == pytest.approx(said["load"], rel=0.05)
    dram_tokens = made.machine.dram_bytes / made.machine.model.token_bytes
    assert asked.live_tokens / dram_tokens == pytest.approx(said["live_dram"], rel=0.01)
    drive = made.machine.drive
    disk_tokens = drive.num_bytes / made.machine.model.token_bytes if drive else math.inf
    assert asked.live_tokens / disk_tokens == pytest.approx(said.get("live_disk", 0.0), rel=0.01)
    at_most = asked.live_tokens / made.machine.kv_tokens
    assert at_most <= said["live_vram"] * 1.01
    assert made.machine.kv_tokens >= 2 * made.workload.num_tokens


@pytest.mark.parametrize(("name", "dram_gb"), [("published/10", 400), ("published/10 50 GB", 50)])
def test_what_was_published_is_played_as_it_was(name: str, dram_gb: int) -> None:
    made = scene(CELLS[name], seed=42)
    assert len(made.workload.programs) == 433
    assert made.workload.programs == eight_turns(10.0, seed=42).programs
    assert made.machine.kv_tokens == PUBLISHED_KV_TOKENS["H100"]
    assert made.machine.dram_bytes == dram_gb * GB


def test_a_cell_survives_being_a_job() -> None:
    cell = CELLS["coding/near"]
    again = cell_of({"cell": cell.name, **cell.said})
    assert again.said == cell.said
    assert scene(again, 3) == scene(Cell(cell.name, cell.said), 3)


def test_the_best_arm_is_never_one_that_no_server_can_run() -> None:
    found = judged(stock=4.0, adaptive=2.0, infinite=1.0)
    assert found.winner == "adaptive"
    assert found.to_best == 1.0


def test_related_policies_are_arms_to_beat_but_no_rivals() -> None:
    found = judged(stock=4.0, adaptive=2.0, continuum=1.6, paper=2.5)
    assert found.to_best == pytest.approx(1.25)
    assert found.to_rival == pytest.approx(0.8)
    assert not found.holds


@pytest.mark.parametrize(("ours", "holds"), [(1.005, True), (1.02, False), (0.5, True)])
def test_where_nothing_is_to_be_won_ours_is_held_against_stock(ours: float, holds: bool) -> None:
    assert judged("stock", stock=1.0, adaptive=ours, paper=0.2).holds == holds


def test_a_cell_that_was_not_run_with_every_arm_is_not_judged() -> None:
    cells = [Cell("whole", {"workload": "agents"}), Cell("part", {"workload": "agents"})]
    asked = [job(cell, arm, 1) for cell in cells for arm in ("stock", "adaptive")]
    results = [Result(each, record(each.arm, [1.0])) for each in asked[:3]]
    for more in ([], [Result(asked[3], error="KeyError: 'a'")]):
        assert [each.cell.name for each in judge(cells, [*results, *more], asked)] == ["whole"]
    assert "**1 cells are not here" in page([], ORIGIN, num_missing=1)


def test_where_the_page_says_that_we_lose_the_matrix_says_why() -> None:
    lines = PAGE.read_text().split("## Where ours")[1].splitlines()
    lost = [line.split("|")[1].strip() for line in lines if line.count("|") == 7][2:]
    assert lost == [name for name in lost if CELLS[name].reason], "no reason in matrix.toml"


def test_a_cell_that_is_lost_stands_on_the_page_with_its_reason() -> None:
    lost = judged(stock=1.0, adaptive=1.5)
    text = page([lost, judged(stock=2.0, adaptive=1.0)], ORIGIN)
    assert "| a cell | 1.500 | (1.500) | 1.500 | stock | not known |" in text
    assert "| mean JCT at most 1.02x the best arm's | 1 of 2 |" in text
    assert "| a cell | 90% | 1.00 |" in text


def test_the_page_says_where_its_numbers_come_from() -> None:
    text = page([], ORIGIN)
    assert "`command`; seeds 1, 2; code c0de" in text
    assert "Arms: stock, adaptive, lru_offload. Rivals, which are not ours: stock." in text


def test_an_arm_that_is_nothing_without_a_disk_is_run_where_there_is_one() -> None:
    arms = ["stock", "adaptive", "adaptive-no-disk"]
    assert arms_of(CELLS["fast/disk 7"], arms) == arms
    assert arms_of(CELLS["fast/dram 4"], arms) == ["stock", "adaptive"]


@pytest.mark.parametrize(("num_seeds", "is_judged"), [(1, False), (2, True)])
def test_a_p99_is_judged_over_the_programs_of_all_seeds(num_seeds: int, is_judged: bool) -> None:
    """Sixty programs a seed, the slowest two of them twice as slow with ours."""
    seeds = range(num_seeds)
    runs = {
        "stock": {seed: record("stock", [1.0] * 60) for seed in seeds},
        "adaptive": {seed: record("adaptive", [0.9] * 58 + [2.0, 2.0]) for seed in seeds},
    }
    found = verdict(Cell("c", {}), runs)
    assert found.to_best_p99 == 2.0
    assert found.judges_p99 == is_judged
    assert found.holds != is_judged
    text = page([found], ORIGIN)
    assert ("| 2.00 |" if is_judged else "| (2.00) |") in text
    assert f"| P99 at most 1.05x the best arm's | 0 of {num_seeds - 1} |" in text


def written(path: Path, *runs: tuple[str, str, int, float]) -> Path:
    """A results file of (cell, arm, seed, seconds that its two programs took)."""
    with Store(path) as file:
        for cell, arm, seed, seconds in runs:
            made = replace(record(arm, [seconds, seconds]), num_computed_tokens=100)
            file.append(Result(Job(arm, "fake", {"cell": cell}, seed=seed), made))
    return path


def test_two_arms_are_compared_cell_by_cell_with_the_seeds_that_both_have(tmp_path: Path) -> None:
    path = written(
        tmp_path / "runs.jsonl",
        *[("a", "gate", 1, 8.0), ("a", "gate", 2, 6.0), ("a", "gate", 3, 1.0)],
        *[("a", "adaptive", 1, 10.0), ("a", "adaptive", 2, 10.0)],
        *[("b", "gate", 1, 5.0), ("b", "adaptive", 1, 5.0), ("c", "gate", 1, 5.0)],
    )
    cells = pair.pairs(path, "gate", "adaptive")
    assert {cell: len(both) for cell, both in cells.items()} == {"a": 2, "b": 1}
    head, _, row, rest = pair.table(cells, "adaptive", "gate", least=0.01)
    assert head.startswith("| cell | adaptive, s |")
    assert row.startswith("| a | 10.0 | 0.70 | 0.80/0.60 | - |")
    assert rest == "\n1 other cells: 1.000 to 1.000. Ratios of gate to adaptive."


def test_two_arms_that_were_never_run_together_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.jsonl", ("a", "gate", 1, 8.0))
    with pytest.raises(ToldError, match="no cell with runs of both gate and adaptive"):
        pair.main([str(path), "gate", "adaptive"])
