"""What each part of ours earns: what is kept of a results file, and the pages made of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("tomllib")  # Python 3.11

from bench import markers
from bench.common.arms import OURS
from bench.results.kept import Kept
from bench.sim import parts
from bench.sim.cells import load_matrix
from bench.sim.job import Job, Result, Start
from bench.sim.matrix import job
from bench.sim.parts import front, keep, page, read, regime
from bench.sim.store import Store
from bench.tests.test_sim_matrix import record
from continuum_connector.errors import ToldError

CELLS = {cell.name: cell for cell in load_matrix().cells}


def test_the_pages_are_what_the_command_makes_of_what_is_kept() -> None:
    assert parts.PAGE.read_text() == page(read())
    text = parts.README.read_text()
    if f"<!-- {parts.MARKER} -->" in text:
        assert markers.replace(text, parts.MARKER, front(read())) == text


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fast/none", "one-shot requests, or hardly any load"),
        ("coding/moderate", "a GPU that is half busy"),
        ("coding/disk idle", "a busy GPU, DRAM holds all live KV"),
        ("published/15 50 GB", "more live KV than DRAM holds"),
        ("fast/dram 1", "a busy GPU, DRAM holds all live KV"),
        ("fast/disk 7", "more live KV than DRAM holds, and a disk"),
        ("fast/pcie 6 x4", "PCIe of 6 to 25 GB/s"),
    ],
)
def test_the_regime_of_a_cell(name: str, where: str) -> None:
    assert regime(CELLS[name]) == where


def run_of(cell: str, arm: str, seed: int, *jct_s: float, code: str = "c0de") -> Result:
    return Result(job(CELLS[cell], arm, seed), record(arm, list(jct_s)), code=code)


def written(path: Path, *results: Result) -> Path:
    with Store(path) as file:
        file.append(Start("command", {"vllm": "0.32.0", "commit": "abc1234"}))
        for each in results:
            file.append(each)
    return path


def every_arm(cell: str, seed: int, *seconds: float, code: str = "c0de") -> list[Result]:
    """Runs of each arm, which took so long."""
    return [
        run_of(cell, arm, seed, s, code=code) for arm, s in zip(parts.ARMS, seconds, strict=True)
    ]


def test_kept_are_mean_seconds_over_the_seeds_that_all_arms_have(tmp_path: Path) -> None:
    changed = Job(OURS, "agents", {"cell": "fast/over", "workload": "agents"}, seed=101)
    path = written(
        tmp_path / "runs.jsonl",
        *every_arm("coding/near", 101, 15.0, 16.0, 30.0, 17.0, 18.0),
        run_of("coding/near", OURS, 102, 1.0),
        *every_arm("fast/near", 101, 4.0, 9.0, 5.0, 6.0, 7.0),
        *every_arm("fast/near", 102, 8.0, 9.0, 9.0, 8.0, 9.0),
        *every_arm("fast/over", 101, 1.0, 1.0, 1.0, 1.0, 1.0)[1:],  # nothing beside ours
        Result(changed, record(OURS, [1.0]), code="c0de"),  # not the cell of today
    )
    kept = keep(path)
    assert kept.rows == [
        ["fast/near", "101, 102", 6.0, 9.0, 7.0, 7.0, 8.0],
        ["coding/near", "101", 15.0, 16.0, 30.0, 17.0, 18.0],
    ]
    assert kept.commit == "abc1234"
    assert "--seeds 101,102 --out runs/runs.jsonl" in kept.command


def test_runs_of_two_codes_are_not_held_against_each_other(tmp_path: Path) -> None:
    whole = every_arm("fast/near", 1, 1.0, 1.0, 1.0, 1.0, 1.0)
    old = run_of("fast/near", OURS, 2, 1.0, code="0ld")
    with pytest.raises(ToldError, match="runs of code 0ld and c0de"):
        keep(written(tmp_path / "runs.jsonl", *whole, old))


def test_a_file_with_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToldError, match="nothing to keep"):
        keep(written(tmp_path / "runs.jsonl", run_of("fast/near", OURS, 1, 1.0)))


def made(*rows: list[str | float | None]) -> Kept:
    return msgspec.structs.replace(read(), rows=[*rows])


#                                    adaptive no-order no-dram no-pins order-only
NEAR = ["coding/near", "101", 10.0, 12.0, 20.0, 9.0, 30.0]
OVER = ["coding/over", "101", 10.0, 11.0, 15.0, 10.0, 24.0]
SHORT = ["coding/dram 2", "101", 10.0, 8.0, 10.0, 10.0, 10.0]


def test_the_page_says_what_each_part_earns_and_where_one_costs() -> None:
    text = page(made(NEAR, OVER, SHORT))
    busy = "| a busy GPU, DRAM holds all live KV (2) | 1.15 (1.10 to 1.20) | 1.75 (1.50 to 2.00) "
    assert busy + "| 0.95 (0.90 to 1.00) | 1.55 (1.50 to 1.60) |" in text
    assert "| more live KV than DRAM holds (1) | 0.80 (0.80 to 0.80) | 1.00 (1" in text
    assert "| all (3) | 1.10 (0.80 to 1.20) |" in text
    assert "| program order | 1.20 in coding/near | 0.80 in coding/dram 2 |" in text
    losses = text.split("costs more than 1 %")[1].split("## Every cell")[0]
    assert losses.split("---|\n")[1].strip().splitlines() == [
        "| coding/dram 2 | program order | 0.800 |",
        "| coding/near | pins beside DRAM | 0.900 |",
    ]
    assert "| coding/near | 101 | 10.00 | 1.20 | 2.00 | 0.90 | 3.00 |" in text
    assert f"**{len(CELLS) - 3} cells were not run with every arm.**" in text


def test_the_front_page_does_not_hide_where_a_part_costs() -> None:
    text = front(made(NEAR, OVER, SHORT))
    assert "program order: 0.80 in coding/dram 2; DRAM tier: 1.00 in coding/dram 2" in text
    assert "pins beside DRAM: 0.90 in coding/near" in text


def test_the_command_keeps_and_writes_both_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEPT", "PAGE", "README"):
        monkeypatch.setattr(parts, name, tmp_path / name)
    parts.README.write_text("# Us\n<!-- parts -->\n<!-- /parts -->\n")
    runs = written(tmp_path / "runs.jsonl", *every_arm("fast/near", 1, 1.0, 1.5, 2.0, 1.0, 3.0))
    assert parts.main([str(runs)]) == 0
    assert "| fast/near | 1 | 1.00 | 1.50 | 2.00 | 1.00 | 3.00 |" in parts.PAGE.read_text()
    assert "| all (1) | 1.50 (1.50 to 1.50) | 2.00 " in parts.README.read_text()
