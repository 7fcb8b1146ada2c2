"""What is made of the lab's results: numbers, and a page that needs nothing else."""

from __future__ import annotations

import pytest

from bench.common.arms import OURS
from bench.common.tables import quantile
from bench.serve.summary import summarize
from bench.sim.job import Job, Result, Start
from bench.sim.report import loaded, page, points, scene
from bench.tests.lab_results import record, result
from bench.tests.pages import read

ARMS = ("stock", "paper", OURS, "infinite")
STARTS = [Start("continuum simulate --arms <x>", {"vllm": "0.32.0"})]


@pytest.fixture(scope="module")
def text() -> str:
    factors = {"stock": 4.0, "paper": 2.0, OURS: 1.5, "infinite": 1.0}
    results = [
        result(arm, load, load * factors[arm], gpu)
        for gpu in ("H100", "L40S")
        for load in (1.0, 3.0, 6.0)
        for arm in ARMS
    ]
    failed = Result(Job("dies", "fake", {"rate": 6}, {"gpu": "H100"}), error="ValueError: <no>")
    return page([*results, failed], STARTS)


# --- the page -------------------------------------------------------------------------------
def test_the_page_says_what_was_run_and_what_failed(text: str) -> None:
    words = " ".join(read(text).words)
    for each in ("continuum simulate --arms <x>", "vllm 0.32.0", "made up <here>", "24 done"):
        assert each in words
    assert "1 died" in words
    assert "ValueError: <no>" in words


def test_the_page_begins_with_what_it_cannot_say_and_ours_beside_the_best_that_can_be_had(
    text: str,
) -> None:
    words = " ".join(read(text).words)
    assert "Every number is simulated" in words
    assert "On a CPU" not in words
    row = text[text.index("<td>H100, fake, 3 programs per second") :].partition("</tr>")[0]
    best = [cell for cell in row.split("<td")[1:] if "best" in cell]
    assert len(best) == 1  # ours: `infinite` is faster, and no server has it
    assert best[0] == row.split("<td")[2 + ARMS.index(OURS)]


def test_plain_vllm_comes_first_and_oracles_last() -> None:
    said = page([result("infinite"), result(OURS), result("stock")], STARTS)
    assert f"stock · {OURS} · infinite, simulated" in said


# --- numbers --------------------------------------------------------------------------------
def test_seeds_of_one_point_are_repeats() -> None:
    one, other = Job("a", "w", {"rate": 3}, seed=1), Job("a", "w", {"rate": 3}, seed=2)
    (found,) = points([Result(one, record("a")), Result(other, record("a", 3.0))])
    assert list(found.arms["a"].runs) == [1, 2]
    assert found.arms["a"].figure("jct_mean_s") == (9.0 + 27.0) / 2


def test_points_come_by_load_and_whatever_differs_is_another_scene() -> None:
    jobs = [Job("a", "w", {"rate": rate, "turns": turns}) for rate in (10, 2) for turns in (4, 8)]
    found = points(Result(job, record("a")) for job in jobs)
    assert [(each.scene, each.load) for each in found] == [
        ("w, turns 4", 2.0),
        ("w, turns 4", 10.0),
        ("w, turns 8", 2.0),
        ("w, turns 8", 10.0),
    ]


def test_a_scene_reads_as_people_say_it() -> None:
    job = Job("a", "w", {}, {"gpu": "H100", "tp": 2, "dram_gb": 400, "pcie_gb_s": 25.0})
    assert scene(job) == "H100, TP 2, 400 GB DRAM, PCIe 25 GB/s, w"


def test_a_run_has_the_figures_of_one_on_a_server() -> None:
    wanted = {
        "jct_mean_s": 9.0,
        "ttft_mean_s": 1.5,
        "turn_mean_s": 3.0,
        "prompt_tokens": 1500,
        "cached_pct": 70.0,
        "computed_tokens": 450,
        "hit_vram_tokens": 750,
        "hit_dram_tokens": 300,
        "stored_gb": 20.0,
        "loaded_gb": 30.0,
        "busy_pct": 50.0,
        "failed_programs": 0,
    }
    found = summarize(loaded(result("a")))
    assert {key: found[key] for key in wanted} == wanted


def test_quantiles_are_values_that_occurred() -> None:
    ordered = [float(i) for i in range(1, 101)]
    assert [quantile(ordered, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile([7.0], 0.99) == 7.0
