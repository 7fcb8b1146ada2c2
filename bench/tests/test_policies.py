"""bench/policies: what the table makes of runs, and which programs a server sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.policies import regimes, table
from bench.policies.run import Setting, find_missing, parse
from continuum_connector.policy.continuum import K


def record(policy: str, seed: int, jct_s: list[float], **changed: Any) -> dict[str, Any]:
    run = {"pressure": "room", "regime": "fast", "policy": policy, "seed": seed, "jct_s": jct_s}
    run |= {"failed": 0, "preemptions": 0.0, "answers": {"a/0": "x", "a/1": "y"}}
    run |= {"prompt_tokens": 200.0, "computed": 100.0, "vram": 100.0, "dram": 0.0}
    return run | {"pins_ended": {"returned": 2, "pressure": 1}} | changed


def row(folder: Path, policy: str, *records: dict[str, Any]) -> dict[str, str]:
    """The cells of the policy's row by their column."""
    file = folder / "runs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    head, _, *rows = table.render(table.load(file)).splitlines()
    names = [name.strip() for name in head.split("|")[1:-1]]
    (mine,) = [each for each in rows if f"| {policy} |" in each]
    cells = [cell.strip() for cell in mine.split("|")[1:-1]]
    assert len(names) == len(cells)
    unique = [name if names.index(name) == i else f"{name} {i}" for i, name in enumerate(names)]
    return dict(zip(unique, cells, strict=True))


def test_ratios_are_to_stock_with_the_same_seed(tmp_path: Path) -> None:
    cells = row(
        tmp_path,
        "adaptive",
        record("stock", 1, [4.0, 8.0]),
        record("stock", 2, [1.0, 1.0]),
        record("adaptive", 1, [1.0, 5.0], computed=150.0),
        record("adaptive", 2, [1.0, 2.0], answers={"a/0": "x", "a/1": "z"}),
    )
    assert cells["JCT mean s"] == "2.25 [1.50..3.00]"
    assert cells["of stock"] == "1.00x [0.50x..1.50x]"
    assert cells["slowest s"] == "3.5 [2.0..5.0]"
    assert cells["recomputed"] == "25 [0..50]"
    assert cells["pins back / given up / expired"] == "4 / 2 / 0"
    assert cells["same answers"] == "3/4"
    assert cells["failed, preempted"] == "0, 0"


def test_a_failed_program_makes_no_job_short(tmp_path: Path) -> None:
    stock = record("stock", 1, [4.0, 8.0])
    cells = row(tmp_path, "adaptive", stock, record("adaptive", 1, [2.0], failed=1, preemptions=3))
    assert cells["JCT mean s"] == cells["of stock"] == "-"
    assert cells["failed, preempted"] == "1, 3"
    cells = row(tmp_path, "adaptive", stock, record("adaptive", 1, [], failed=2))
    assert cells["slowest s"] == "-"


def test_the_first_run_teaches_more_gaps_than_a_cold_start_lasts() -> None:
    first = regimes.plans(regimes.REGIMES["coding"], regimes.WARM_UP, regimes.LEARN)
    assert sum(len(plan.turns) - 1 for plan in first) > K


def test_regimes_differ_in_gaps_alone() -> None:
    plans = [regimes.plans(regime, 3) for regime in regimes.REGIMES.values()]
    words = [[[turn.text for turn in plan.turns] for plan in each] for each in plans]
    assert words[0] == words[1] == words[2]
    gaps = [[turn.gap_s for plan in each for turn in plan.turns[1:]] for each in plans]
    assert gaps[0] != gaps[1] != gaps[2]


def test_seeds_that_size_no_server_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--seeds", "9"])
    assert "invalid choice: 9" in capsys.readouterr().err


def test_what_is_in_the_file_is_not_run_again_and_each_seed_begins_elsewhere(
    tmp_path: Path,
) -> None:
    out = tmp_path / "runs.jsonl"
    out.write_text(json.dumps(record("adaptive", 1, [1.0])) + "\n")
    options = parse(["--policies", "stock,adaptive", "--seeds", "2", "--out", str(out)])
    missing = find_missing(Setting("room", "fast"), options)
    assert missing == {1: ["stock"], 2: ["stock", "adaptive"]}
    assert find_missing(Setting("pressure", "fast"), options)[1] == ["adaptive", "stock"]
