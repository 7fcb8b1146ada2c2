"""The page about a result folder: it tells all, needs nothing, and lives with what is missing."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.serve import results
from bench.serve.commands import app
from bench.serve.page import NOTHING, cautions, page
from bench.serve.page import read as read_points
from bench.serve.results import ResultError
from bench.tests.ab_results import FACTORS, experiment, measured, run_of, settings

VOID = {"meta", "br"}
ELSEWHERE = r"<script|<link|<img|<iframe|@import|url\((?!#)[^)]*"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page([experiment(tmp_path_factory.mktemp("ab"), (0.5, 2.0, 4.0))])


class Reader(html.parser.HTMLParser):
    """As a browser: every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.sources: list[str] = []  # what the page asks of elsewhere
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open += [tag] * (tag not in VOID)
        self.sources += [v or "" for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += filter(None, [data.strip()])


def seen(text: str) -> str:
    return " ".join(Reader(text).words)


def warned(folder: Path) -> str:
    return " ".join(cautions(*read_points([folder])))


def test_the_page_is_whole_and_names_every_arm_wherever_arms_are_compared(text: str) -> None:
    reader = Reader(text)
    for arm in FACTORS:
        assert reader.words.count(arm) >= 5, arm  # overviews, and a table for each point
    assert not [source for source in reader.sources if not source.startswith("#")]
    assert not re.findall(ELSEWHERE, text)


def test_the_page_says_what_was_run_and_what_could_not(text: str) -> None:
    said = seen(text)
    for each in (
        "20 done, 1 could not run; 2 repeats",
        "pressure, turns, 5 programs, seed 42",
        "float32, VRAM for 2,048 tokens",
        "128 MiB, live KV / DRAM = 0.5",
        "vllm 0.32.0, torch 2.13.0",
        "Linux <x86>, 2 cores",
        "vllm serve 'a model' continuum:adaptive",
        "it copies with <CUDA>, and there is none here",
    ):
        assert each in said, each


def test_an_answer_that_differs_is_said_where_all_look_first(tmp_path: Path) -> None:
    measured(tmp_path, run_of("none"), 1.0)
    measured(tmp_path, run_of("continuum:adaptive", 2.0), 0.5, answer=8)
    assert "Answers differ from those of none: continuum:adaptive, NO (0/15" in warned(tmp_path)
    assert "Answers differ" not in warned(experiment(tmp_path / "equal"))


def test_a_table_has_every_arms_ratio_and_where_it_found_its_prompts(tmp_path: Path) -> None:
    experiment(tmp_path)
    made = page([tmp_path])
    ours = f"{0.5 ** (1 / 3):.2f}x"  # of the tokens of plain vLLM
    row = made[made.index("<td>continuum:adaptive<") :].partition("</tr>")[0]
    assert f"<small>{ours}</small>" in row
    assert "yes (30/30)" in row
    assert row.count("<i style=") == 3
    assert made.count('class="ours"') == 1


def test_a_server_that_tells_nothing_of_its_tiers_has_a_row_without_them(tmp_path: Path) -> None:
    folder = measured(tmp_path, run_of("none"), 1.0)
    assert "computed</th>" in page([tmp_path])
    (folder / results.BEFORE).unlink()
    assert "computed</th>" not in page([tmp_path])


def test_a_busy_machine_few_repeats_and_a_cpu_are_warned_of(tmp_path: Path) -> None:
    few = {"machine": {"cores": "2", "load_before": "4.5"}}
    said = warned(experiment(tmp_path / "few", repeats=1, **few))
    assert "Times of this result say little" in said
    assert "Fewer than 5 repeats: " in said
    assert "On a CPU" not in said
    said = warned(experiment(tmp_path / "cpu", repeats=5, versions={"vllm": "0.32.0+cpu"}))
    assert said.startswith("On a CPU")
    assert "say little" not in said
    assert "Fewer than 5 repeats: " not in said


def test_folders_of_several_loads_make_one_page_with_jct_against_load(tmp_path: Path) -> None:
    folders = [
        experiment(tmp_path / rate, (int(rate) / 8,), 1, settings=settings(f"poisson:{rate}"))
        for rate in ("6", "1", "3")  # the same DRAM is under another pressure at each
    ]
    made = page(folders)
    said = seen(made)
    assert "Mean JCT against load" in said
    assert made.count("<polyline") == len(FACTORS)
    assert "programs that arrive per second" in said
    places = [said.index(f" {rate} program") for rate in (1, 3, 6)]
    assert said.index("Mean JCT") < places[0]
    assert places == sorted(places)
    assert [point.load for point in read_points(folders)[1]] == [1.0, 3.0, 6.0]


def test_folders_that_do_not_belong_together_are_told_apart(tmp_path: Path) -> None:
    first = experiment(tmp_path / "a", repeats=1)
    with pytest.raises(ResultError, match="the same load"):
        page([first, experiment(tmp_path / "b", repeats=1)])
    other = experiment(tmp_path / "c", settings=settings("poisson:3") | {"dtype": "bfloat16"})
    with pytest.raises(ResultError, match="differ in dtype"):
        page([first, other])


def test_plain_vllm_is_the_base_whenever_it_ran_unless_another_is_named(tmp_path: Path) -> None:
    measured(tmp_path, run_of("lmcache-mp", 2.0, order=0), 0.8)
    measured(tmp_path, run_of("none", order=1), 1.0)
    for base, first in {"": "none", "lmcache-mp": "lmcache-mp"}.items():
        _, (point,) = read_points([tmp_path], base)
        assert next(iter(point.arms)) == first


# --- what is missing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "told"),
    [("running", "never ended"), ("died", "died"), ("cannot_run", "it has no <GPU>")],
)
def test_a_run_that_did_not_end_is_listed_and_the_others_are_compared(
    tmp_path: Path, state: results.State, told: str
) -> None:
    run = run_of("simple", 2.0, state=state, reason=told * (state == "cannot_run"))
    results.write_run(tmp_path / results.RUNS / run.name, run)
    assert NOTHING in seen(page([tmp_path]))
    measured(tmp_path, run_of("none"), 1.0)
    said = seen(page([tmp_path]))
    assert f"simple : {told}" in said
    assert NOTHING not in said


def test_an_interrupted_run_is_in_the_page_and_warned_of(tmp_path: Path) -> None:
    measured(tmp_path, run_of("none"), 1.0)
    run = run_of("continuum:adaptive", 2.0)
    folder = measured(tmp_path, run, 0.5)
    run.state, run.reason = "interrupted", "Ctrl-C"
    results.write_run(folder, run)
    assert "its mean JCT is too low" in warned(tmp_path)


# --- the command ----------------------------------------------------------------------------
def report(*words: Path | str) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_command_writes_the_page_beside_the_runs_or_where_it_is_warned(tmp_path: Path) -> None:
    measured(tmp_path, run_of("none"), 1.0)
    done, other = report(tmp_path), report(tmp_path, "-o", tmp_path / "x.html")
    assert done.exit_code == other.exit_code == 0, done.output
    assert "report.html: 0." in done.output
    assert (tmp_path / "x.html").read_text() == (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("made", "said"),
    [("", "holds no results"), ("runs", "holds no run yet"), ("runs/x/run.json", "cannot be read")],
)
def test_the_command_says_in_a_sentence_why_there_is_no_page(
    tmp_path: Path, made: str, said: str
) -> None:
    path = tmp_path / made
    (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
    if path.suffix:
        path.write_text("{")
    done = report(tmp_path)
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output


def test_what_another_client_says_has_columns_where_there_is_one(tmp_path: Path) -> None:
    ours = page([experiment(tmp_path / "ours")])
    folder = tmp_path / "theirs"
    by = {"settings": settings() | {"client": "aiperf 0.13.0"}, "told": {"theory_pct": 80.0}}
    for arm, factor in FACTORS.items():
        measured(folder, run_of(arm, **by), factor)
    theirs = page([folder])
    for name in ("could be cached", "of that cached", "aiperf 0.13.0"):
        assert name in theirs
        assert name not in ours
