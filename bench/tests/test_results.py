"""What is published is what is kept: docs/results.md, README's numbers, and tables of results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.results import __main__ as command
from bench.results import kept, page
from bench.results.readers import READERS

TABLES = kept.read_all()
MOST_BYTES = 8192


def test_the_page_is_made_of_the_files() -> None:
    assert page.results(TABLES) in command.RESULTS.read_text(), "run python -m bench.results"


def test_the_front_page_quotes_the_files() -> None:
    assert page.front(TABLES) in command.README.read_text(), "run python -m bench.results"


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


def demo_run(path: Path, ours_jct_s: float, answer: str) -> Path:
    """What bench.chat.demo writes, as far as it is read."""
    arms = []
    for jct_s, text in ((10.0, "yes"), (ours_jct_s, answer)):
        turns = [{"program": "a", "turn": 0, "text": text}]
        figures = dict.fromkeys(
            ("jct_p95_s", "ttft_mean_s", "ttft_first_mean_s", "recomputed"), 1.0
        )
        arms.append({"summary": {"jct_mean_s": jct_s, **figures}, "programs": [{"turns": turns}]})
    path.write_text(json.dumps({"versions": {"vllm": "1"}, "arms": arms}))
    return path


def test_runs_of_the_demo_are_told_by_the_median_of_their_ratios(tmp_path: Path) -> None:
    said = ((4.0, "yes"), (9.0, "yes"), (5.0, "no"))
    paths = [demo_run(tmp_path / f"{i}.json", *each) for i, each in enumerate(said)]
    found = READERS["demo"](paths)
    assert found.rows[0] == ["JCT mean", 10.0, 5.0, 0.5, 0.4, 0.9]
    assert (found.cited["same_answers"], found.cited["answers"]) == (2.0, 3.0)


def test_a_queues_steps_are_told_as_shares_of_stocks(tmp_path: Path) -> None:
    result = {
        "waiting": 8000,
        "policy": "adaptive",
        "stock_step_us": [10, 20, 30],
        "step_us": [20, 22, 90],
    }
    (tmp_path / "queue.json").write_text(json.dumps([result]))
    found = READERS["queue"]([tmp_path / "queue.json"])
    assert found.rows == [["8,000", "adaptive", 20.0, 1.1, 2.2]]


def test_keeping_a_table_anew_leaves_what_people_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    pages: list[None] = []
    monkeypatch.setattr(command, "write", lambda: pages.append(None))
    words = ["--command", "make demo", "--commit", "abc1234"]

    def keep(jct_s: float) -> kept.Kept:
        run = demo_run(tmp_path / "run.result", jct_s, "yes")
        assert command.main(["keep", "demo", "agents", str(run), *words]) == 0
        return kept.read("agents")

    first = keep(5.0)
    first.question, first.notes, first.place = "Sooner?", ["**No**"], 7
    kept.write("other", first)
    (tmp_path / "other.json").rename(tmp_path / "agents.json")
    again = keep(2.0)
    assert (again.question, again.notes, again.place) == ("Sooner?", ["**No**"], 7)
    assert again.cited["jct_mean_s"] == 0.2
    assert len(pages) == 2
