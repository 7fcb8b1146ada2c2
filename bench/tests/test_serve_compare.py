"""From result folders to tables: reading back, pairing, intervals, equality, the commands."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.common.tables import mean
from bench.serve import compare, results, stats, summary
from bench.serve.commands import app
from bench.serve.record import RunFolder
from bench.serve.results import ResultError, Run, Turn
from bench.tests.ab_results import experiment, measured, run_of
from bench.tests.fake_server import fake_server
from continuum_connector.tools.cli import app as find_bench
from continuum_connector.tools.cli.app import app as continuum


def write(
    root: Path, arm: str, repeat: int, slower: float = 1.0, pressure: float = 0.0, **more: int
) -> Path:
    """A run `slower` times as long as in the first arm."""
    return measured(root, run_of(arm, pressure, repeat), slower, **more)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, "none", 0, pressure=2.0)
    (run,) = results.load(tmp_path)
    assert run.run.state == "done"
    assert run.run.dram is not None
    assert run.run.dram.pressure == 2.0
    assert (len(run.turns), len(run.programs)) == (15, 5)
    figures = summary.summarize(run)
    assert figures["jct_mean_s"] == 9.0
    assert figures["jct_p95_s"] == 15.0
    assert figures["computed_tokens"] == 15_000
    assert figures["programs"] == 5


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, "none", 0)
    path = folder / results.TURNS
    path.write_bytes(path.read_bytes()[:-9])
    assert len(results.load_run(folder).turns) == 14


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "none", 0) / results.TURNS
    path.write_bytes(b"x\n" + path.read_bytes())
    with pytest.raises(ResultError, match=r"turns\.jsonl"):
        results.load(tmp_path)


def test_a_run_that_fails_in_between_says_how_it_ended(tmp_path: Path) -> None:
    def fail() -> None:
        with RunFolder(tmp_path, Run(name="r")) as out:
            out.turn(Turn(program="p", turn=0, start_s=0.0, latency_s=1.0))
            raise RuntimeError("power")

    with pytest.raises(RuntimeError):
        fail()
    run = results.load_run(tmp_path)
    assert (run.run.state, run.run.reason) == ("interrupted", "RuntimeError: power")
    assert len(run.turns) == 1


def samples(*values: float) -> list[dict[str, list[float]]]:
    return [{f"p{i}": [value] for i, value in enumerate(values)}]


def test_the_ratio_of_programs_that_are_all_twice_as_slow_is_certain() -> None:
    ratio = stats.paired_ratio(samples(1, 5, 9) * 5, samples(2, 10, 18) * 5, mean)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert not ratio.low <= 1 <= ratio.high
    assert str(ratio) == "2.00x [2.00..2.00]"


def test_only_programs_that_both_have_are_compared() -> None:
    ratio = stats.paired_ratio([{"a": [1.0], "b": [50.0]}], [{"a": [3.0]}], mean)
    assert ratio.value == pytest.approx(3.0)
    assert math.isnan(stats.paired_ratio([{"a": [1.0]}], [{}], mean).value)


def test_the_interval_of_five_repeats_holds_the_true_ratio_as_often_as_it_says() -> None:
    """Repeats differ (machine and load), and programs within them; 1,000 experiments."""
    rng, true, num = np.random.default_rng(1), 0.8, 30
    hits = 0
    for _ in range(1000):
        base = rng.lognormal(0, 1, (5, num))
        other = base * true * rng.lognormal(0, 0.15, (5, 1)) * rng.lognormal(0, 0.1, (5, num))
        pairs = ([dict(enumerate(row[:, None])) for row in side] for side in (base, other))
        ratio = stats.paired_ratio(*pairs, lambda values: math.exp(np.log(values).mean()))
        hits += ratio.low <= true <= ratio.high
    assert 0.90 <= hits / 1000 <= 0.99


def test_few_repeats_have_a_ratio_and_no_interval() -> None:
    ratio = stats.paired_ratio(samples(1, 5) * 4, samples(2, 10) * 4, mean)
    assert str(ratio) == "2.00x"


@pytest.mark.parametrize(("programs", "has"), [(19, False), (20, True)])
def test_a_p95_has_an_interval_from_a_hundred_programs_on(
    tmp_path: Path, programs: int, has: bool
) -> None:
    for repeat in range(5):
        write(tmp_path, "none", repeat, programs=programs)
        write(tmp_path, "ours", repeat, slower=0.5, programs=programs)
    base, ours = compare.columns(results.load(tmp_path))
    told = {key: str(compare.ratio(base, ours, key)) for key in summary.BY_KEY}
    assert ("[" in told["jct_p95_s"]) == ("[" in told["ttft_p95_s"]) == has
    assert "[" in told["jct_mean_s"]


def test_there_is_no_ratio_of_jct_where_one_arm_lost_more_programs(tmp_path: Path) -> None:
    write(tmp_path, "none", 0)
    write(tmp_path, "ours", 0, slower=0.5, failed=1)
    write(tmp_path, "alike", 0, failed=1)
    found = {column.key[0]: column for column in compare.columns(results.load(tmp_path))}
    keys = ("jct_mean_s", "jct_p95_s", "ttft_mean_s")
    told = [str(compare.ratio(found["none"], found["ours"], key)) for key in keys]
    assert told == ["-", "-", "0.50x"]
    assert str(compare.ratio(found["ours"], found["alike"], "jct_mean_s")) == "2.00x"


def test_arms_are_compared_and_their_answers_checked(tmp_path: Path) -> None:
    for repeat in range(2):
        write(tmp_path, "none", repeat)
        write(tmp_path, "ours", repeat, slower=0.5, answer=8 if repeat else 7)
    base, ours = compare.columns(results.load(tmp_path))
    ratios = {key: compare.ratio(base, ours, key) for key in summary.BY_KEY}
    told = {key: str(each) for key, each in ratios.items() if each is not None}
    assert told.pop("jct_p99_s") == "-"  # of ten programs
    assert len(told) == 7
    assert set(told.values()) == {"0.50x"}
    same = compare.sameness(base, ours)
    assert (same.same, same.of) == (15, 30)
    assert str(same) == "NO (15/30; first p0 turn 1 repeat 2)"
    assert str(compare.sameness(base, base)) == "yes (30/30)"


def test_agents_and_compare_from_the_command_line(tmp_path: Path) -> None:
    runner = CliRunner()
    with fake_server() as server:
        for name in "ab":
            line = ["agents", f"{server.url}/v1", "--workload", "pressure"]
            done = runner.invoke(app, [*line, "--out", str(tmp_path / name)])
            assert done.exit_code == 0, done.output
        again = runner.invoke(app, [*line, "--out", str(tmp_path / "a")])
    assert again.exit_code == 1
    assert "holds results already" in again.output
    compared = runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert compared.exit_code == 0
    assert "yes (24/24)" in compared.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "nothing"], "not known"),
        (["--arrivals", "often"], "poisson:RATE"),
        ([], "is the server up"),
    ],
)
def test_a_wrong_wish_is_told_in_one_sentence(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["agents", "http://127.0.0.1:9", *arguments])
    assert done.exit_code == 1
    assert says in " ".join(done.output.split())


def test_in_a_wheel_the_benchmarks_lie_inside_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "continuum_connector"
    (package / "_bench" / "bench_of_wheel").mkdir(parents=True)
    (package / "_bench" / "bench_of_wheel" / "there.py").write_text("found = 'inside'")
    monkeypatch.setattr(find_bench, "PACKAGE", package)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert find_bench.find_bench("bench_of_wheel.there").found == "inside"
    for command in ("bench", "simulate"):  # of which nothing is there
        done = CliRunner().invoke(continuum, [command])
        assert done.exit_code == 1
        assert "install it again" in " ".join(done.output.split())


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="openai")

    monkeypatch.setattr("importlib.import_module", missing)
    for command in ("bench", "simulate"):
        done = CliRunner().invoke(continuum, [command])
        assert done.exit_code == 1
        assert "needs the package openai" in " ".join(done.output.split())


def test_in_80_columns_no_name_and_no_number_is_cut(tmp_path: Path) -> None:
    arms = compare.columns(results.load(experiment(tmp_path)), "none")
    narrow, wide = (Console(width=width, file=io.StringIO()) for width in (80, 400))
    for console in (narrow, wide):
        for shown in compare.tables(console, "x", arms):
            console.print(shown)
    told = [console.file.getvalue().replace("─", "") for console in (narrow, wide)]
    words = [set(text.split()) for text in told]
    assert words[0] == words[1] >= {"continuum:adaptive", "same", "answers", "(30/30)"}
