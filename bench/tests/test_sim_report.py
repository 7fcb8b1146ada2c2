"""What is made of the lab's results."""

from __future__ import annotations

from bench.common.tables import quantile
from bench.serve.summary import summarize
from bench.sim.job import Job, Result
from bench.sim.report import loaded, points, scene
from bench.tests.lab_results import record


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
    job = Job("a", "w", {}, {"gpu": "H100", "dram_gb": 400, "pcie_gb_s": 25.0})
    assert scene(job) == "H100, 400 GB DRAM, PCIe 25 GB/s, w"


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
    found = summarize(loaded(Job("a", "w"), record("a")))
    assert {key: found[key] for key in wanted} == wanted


def test_quantiles_are_values_that_occurred() -> None:
    ordered = [float(i) for i in range(1, 101)]
    assert [quantile(ordered, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile([7.0], 0.99) == 7.0
