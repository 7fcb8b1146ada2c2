"""What is published is what is kept: docs/results.md, README's numbers, and tables of results."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from bench.results import __main__ as command
from bench.results import kept, page
from bench.results.readers import READERS
from bench.tests.ab_results import measured, run_of

TABLES = kept.read_all()
MOST_BYTES = 8192
BAR = 374  # pixels of the longest


def test_the_page_is_made_of_the_files() -> None:
    assert page.results(TABLES) in command.RESULTS.read_text(), "run python -m bench.results"


def test_the_front_page_quotes_the_files() -> None:
    assert page.front(TABLES) in command.README.read_text(), "run python -m bench.results"


def test_the_picture_of_the_front_page_has_a_bar_for_each_run_on_a_gpu() -> None:
    """It is drawn by hand: a bar of so many pixels and behind it the seconds, and its alt text."""
    drawn = (page.ROOT / "docs" / "images" / "agents.svg").read_text()
    seconds = [float(row[3] or 0) for row in TABLES["gpu"].rows]
    wanted = [(f"{BAR * each / max(seconds):.1f}", f"{each:.0f}") for each in seconds]
    bars = re.findall(r'width="([\d.]+)" height="13.0" .*\n<text .*>(\d+) s  ', drawn)
    assert sorted(bars) == sorted(wanted)
    title = drawn.partition("<title>")[2].partition("</title>")[0]
    assert html.unescape(title) in command.README.read_text()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_where_it_is_from_and_what_stands_against_it(name: str) -> None:
    table = TABLES[name]
    assert (kept.FOLDER / f"{name}.json").stat().st_size < MOST_BYTES
    assert table.question.endswith("?")
    assert table.command
    assert re.fullmatch(r"[0-9a-f]{7,}", table.commit), "of a tree that was committed"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table.date)
    assert table.versions
    assert table.is_simulated or table.machine
    assert any("**" in note for note in table.notes), "say where ours does not win"
    assert {len(row) for row in table.rows} == {len(table.columns)}


def demo_run(folder: Path, factor: float, answer: int = 7) -> Path:
    """What bench.chat.demo leaves: ours takes `factor` times as long."""
    measured(folder, run_of("none"), 1.0)
    measured(folder, run_of("continuum:adaptive", 1.0), factor, answer)
    return folder


def test_runs_of_the_demo_are_told_by_the_median_of_their_ratios(tmp_path: Path) -> None:
    said = ((0.25, 7), (0.75, 7), (0.5, 8))
    found = READERS["demo"]([demo_run(tmp_path / f"{i}", *each) for i, each in enumerate(said)])
    assert found.rows[0] == ["JCT mean", 9.0, 4.5, 0.5, 0.25, 0.75]
    assert (found.cited["same_answers"], found.cited["answers"]) == (30.0, 45.0)


def test_ways_to_serve_are_told_with_how_many_answers_are_stocks(tmp_path: Path) -> None:
    measured(tmp_path, run_of("none"), 1.0)
    measured(tmp_path, run_of("continuum:adaptive", 2.0), 0.5)
    measured(tmp_path, run_of("lmcache-mp", 2.0), 0.25, answer=8)
    found = READERS["ab"]([tmp_path])
    assert found.columns[-1] == "same answers"
    assert {row[0]: row[-1] for row in found.rows} == {
        "`none`": None,
        "`continuum:adaptive`": "15 of 15",
        "`lmcache-mp`": "0 of 15",
    }


def test_runs_against_servers_that_stood_are_told_beside_stocks_of_that_seed(
    tmp_path: Path,
) -> None:
    for arm, seed, factor in (("none", 1, 1.0), ("continuum", 1, 0.5), ("none", 2, 0.8)):
        measured(tmp_path / f"{arm}-2.5-{seed}", run_of("none"), factor)
    found = READERS["agents"](list(tmp_path.iterdir()))
    assert [row[:3] for row in found.rows] == [
        ["2.5", "1", "`none`"],
        ["2.5", "1", "`continuum`"],
        ["2.5", "2", "`none`"],
    ]
    assert [row[-2] for row in found.rows] == [1.0, 0.5, 1.0]
    assert found.cited == {"none 2.5 1": 1.0, "continuum 2.5 1": 0.5, "none 2.5 2": 1.0}


def test_aiperfs_shares_are_told_by_pressure_the_best_arm_first(tmp_path: Path) -> None:
    for arm, pressure, factor in (("a", 4.0, 0.75), ("b", 4.0, 0.5), ("a", 2.0, 0.5)):
        measured(tmp_path, run_of(arm, pressure, told={"theory_pct": 50.0}), factor)
    measured(tmp_path, run_of("none", told={"theory_pct": 50.0}), 1.0)
    found = READERS["aiperf"]([tmp_path])
    assert [row[:5] for row in found.rows] == [
        ["no DRAM", "`none`", 0.0, 50.0, 0.0],
        [2.0, "`a`", 50.0, 50.0, 100.0],
        [4.0, "`b`", 50.0, 50.0, 100.0],
        [4.0, "`a`", 25.0, 50.0, 50.0],
    ]
    assert not found.is_simulated


def test_a_storm_is_told_by_its_statuses_and_findings(tmp_path: Path) -> None:
    said = {"statuses": {"400": 7, "hung up by us": 3, "200": 1500}}
    said |= {"findings": [["ledger", "WRONG", "a block is held"]], "virtual_s": 9.0}
    (tmp_path / "storm.json").write_text(json.dumps(said))
    found = READERS["storm"]([tmp_path / "storm.json"])
    assert found.rows == [
        ["ended with 200", None, "1,500"],
        ["ended with 400", None, "7"],
        ["hung up by us", None, "3"],
        ["ledger", "WRONG", "a block is held"],
    ]
    assert found.is_simulated


def test_keeping_a_table_anew_leaves_what_people_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    pages: list[None] = []
    monkeypatch.setattr(command, "write", lambda: pages.append(None))
    words = ["--command", "make demo", "--commit", "abc1234"]

    def keep(factor: float) -> kept.Kept:
        run = demo_run(tmp_path / "run", factor)
        assert command.main(["keep", "demo", "agents", str(run), *words]) == 0
        return kept.read("agents")

    first = keep(0.5)
    first.question, first.notes, first.place = "Sooner?", ["**No**"], 7
    kept.write("other", first)
    (tmp_path / "other.json").rename(tmp_path / "agents.json")
    again = keep(0.25)
    assert (again.question, again.notes, again.place) == ("Sooner?", ["**No**"], 7)
    assert again.cited["jct_mean_s"] == 0.25
    assert not again.is_simulated
    assert len(pages) == 2
