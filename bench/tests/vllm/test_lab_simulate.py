"""`continuum simulate` from the command line to the table, with two arms and a few programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.sim.job import Job
from bench.sim.store import results, starts
from continuum_connector.tools.cli.app import app

LINE = ["simulate", "--arms", "stock,adaptive", "--rates", "0.1", "--workers", "1"]


def simulate(folder: Path, *more: str) -> str:
    paths = ("--out", str(folder / "x.jsonl"))
    result = CliRunner().invoke(app, [*LINE, *paths, *more], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_and_results_and_nothing_is_run_twice(tmp_path: Path) -> None:
    said = simulate(tmp_path)
    assert "H100, llama-8b, 400 GB DRAM, eight_turns, 0.1 programs per second" in said
    assert "2 of 2 runs done." in said
    kept = {result.job.arm: result for result in results(tmp_path / "x.jsonl").values()}
    assert all(result.record and result.record.turns for result in kept.values())

    again = simulate(tmp_path)
    assert "2 of 2 runs done, 2 of them before." in again
    assert len(starts(tmp_path / "x.jsonl")) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arms", "stock,nope"], "there is no arm 'nope'; there is stock, "),
        (["--workload", "nope"], "there is no workload 'nope'; there is eight_turns"),
        (["--workload", "agents", "--set", "wings=2"], "agents has no wings; it has programs, "),
        (["--set", "wings=2"], "workload eight_turns: eight_turns() got an unexpected keyword"),
        (["--gpu", "H900"], "there is no GPU 'H900'; there is L40S, "),
        (["--model", "llama-70b-fp8", "--gpu", "A100-40"], "take a larger GPU"),
        (["--arms", "adaptive-no-disk"], "needs a machine with a disk; give --disk-gb"),
        (["--rates", "0"], "rates are above 0"),
        (["--rates", "x"], "--rates 'x' should be numbers, like 1,3,6"),
        (["--set", "x"], "should read name=value"),
        (["--arms", ""], "nothing to do: name at least one arm"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(
    options: list[str], said: str, tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    result = CliRunner().invoke(app, ["simulate", "--out", str(out), *options])
    assert result.exit_code == 1
    assert said in result.output
    assert not out.exists()


def test_the_list_names_every_kind() -> None:
    result = CliRunner().invoke(app, ["simulate", "--list"], env={"COLUMNS": "160"})
    for each in ("Arms", "stock+order", "Workloads", "eight_turns", "L40S", "mla-16b"):
        assert each in result.output


def test_options_become_jobs(tmp_path: Path) -> None:
    from bench.sim.command import Options, asked

    given = Options(
        arms="stock", workload="eight_turns", rates="1,2", gpu="H100", model="llama-8b",
        dram_gb=100.0, pcie_gb_s=12.0, disk_gb=900.0, disk_gb_s=3.0, seeds="1",
        max_num_batched_tokens=2048, max_num_seqs=64,
        settings=("window_s=9", "tool_s=5.0"), out=tmp_path / "x", workers=1,
    )  # fmt: skip
    params = {"tool_s": 5.0, "window_s": 9}
    where = {"gpu": "H100", "model": "llama-8b", "dram_gb": 100.0, "pcie_gb_s": 12.0}
    where |= {"disk_gb": 900.0, "disk_gb_s": 3.0}
    where |= {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
    expected = [Job("stock", "eight_turns", {"rate": r, **params}, where, 1) for r in (1.0, 2.0)]
    assert [job.key for job in asked(given)] == [job.key for job in expected]
