"""Pages in a real browser: drawn in light and in dark, nothing on the console, nothing cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench.common.arms import OURS
from bench.serve.page import page as served
from bench.sim import report as simulated
from bench.sim.job import Start
from bench.tests.ab_results import experiment
from bench.tests.browser import ask, look, needs_browser
from bench.tests.lab_results import result

PAPER = {False: "#ffffff", True: "#0d1117"}
WARM = {False: "#d1480f", True: "#ff8247"}  # the colour that is ours alone
pytestmark = needs_browser


@pytest.fixture(scope="module", params=["served", "simulated"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "page.html"
    if request.param == "served":
        path.write_text(served.page([experiment(folder, (0.5, 2.0), repeats=1)]))
    else:
        results = [result(arm, load) for load in (1.0, 3.0) for arm in ("stock", OURS, "infinite")]
        path.write_text(simulated.page(results, [Start("continuum simulate", {})]))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_drawn_as_the_reader_prefers_and_the_console_is_silent(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    seen = look(page, tmp_path, dark=dark)
    assert seen.console == []
    share = seen.count(PAPER[dark]) / (seen.pixels.shape[0] * seen.pixels.shape[1])
    assert 0.5 < share < 0.97, share
    assert seen.count(WARM[dark]) > 1000  # lines, names and marks of ours
    assert seen.count(PAPER[not dark]) < 0.001 * seen.pixels.size
    assert seen.count(WARM[not dark]) == 0


def test_no_table_is_cut_off_on_a_common_screen(page: Path, tmp_path: Path) -> None:
    wide = "[...document.querySelectorAll('.wide')]"
    assert int(ask(page, tmp_path, f"{wide}.length")) > 1
    cut = f"{wide}.filter(each => each.scrollWidth > each.clientWidth).length"
    assert ask(page, tmp_path, cut) == "0"
    body = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert ask(page, tmp_path, body) == "true"


def test_a_broken_page_is_seen_to_be_broken(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><body><script>console.error('oh'); nothing()</script></body>")
    seen = look(bad, tmp_path, dark=True)
    assert len(seen.console) == 2
    assert seen.count(WARM[True]) == 0
