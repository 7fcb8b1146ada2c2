"""A dry run shows what the runner would start, for how long, and refuses what it would refuse."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bench.serve import package, results, rivals, router
from bench.serve.ab import Experiment, run_all
from bench.serve.arms import CannotRunError, Place, ServerArm, Setup
from bench.serve.preview import preview
from bench.serve.results import ResultError, Run
from bench.serve.server import ServerOptions
from bench.tests.fake_server import fake_server
from bench.tests.test_serve_ab import SMALL, experiment, model, use
from bench.tests.test_serve_arms import install

__all__ = ["model"]  # a fixture


def shown(wanted: Experiment, out: Path) -> str:
    return "\n".join(preview({out: wanted}))


def part(text: str, arm: str) -> str:
    return next(each for each in text.split("\n# ") if each.startswith(arm))


def test_it_shows_the_command_that_the_runner_then_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = experiment(model, "none-priority", server=ServerOptions(args=["--seed", "1"]))
    told = shown(wanted, tmp_path / "out")
    with fake_server() as server:
        use(monkeypatch, server)
        run_all({tmp_path / "out": wanted})
    (run,) = results.load(tmp_path / "out")
    line = shlex.split(part(told, "none-priority").splitlines()[-1])
    port = line.index("--port") + 1
    assert [*line[:port], "0", *line[port + 1 :]] == run.run.command


@pytest.mark.parametrize("pressures", [(1.0, 4.0), (4.0, 1.0)])
def test_an_arm_that_runs_at_one_pressure_only_is_asked_once_and_counted_for_that(
    model: Path, tmp_path: Path, pressures: tuple[float, ...]
) -> None:
    asked: list[int] = []

    def setup(place: Place) -> Setup:
        asked.append(place.dram_bytes)
        if place.dram_bytes == max(live):
            raise CannotRunError("too much DRAM")
        return Setup()

    wanted = Experiment(
        (ServerArm("picky", "Picky", setup),), SMALL, model, pressures=pressures, repeats=3
    )
    live = [dram.bytes for dram in wanted.drams()]
    told = shown(wanted, tmp_path / "out")
    assert "Runs: 3, 0 of them done" in told
    assert told.count("# picky cannot run: too much DRAM") == 1
    assert asked == live


def test_an_arms_own_environment_is_on_its_line_and_the_others_are_named_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rivals").mkdir()
    install(tmp_path / "rivals", *rivals.packages(on_cpu=False))
    monkeypatch.setattr(package, "on_cpu", lambda: False)
    wanted = experiment(model, "none", "lmcache-mp", rivals=tmp_path / "rivals")
    wanted.server.block_size = 16
    told = shown(wanted, tmp_path / "out")
    assert told.count("HF_HUB_OFFLINE=1") == 1
    side, server = part(told, "lmcache-mp").splitlines()[1:]
    assert side.endswith(" &")
    assert str(tmp_path / "rivals") in server.partition("PYTHONPATH=")[2].split()[0]
    assert server.startswith("LMCACHE_DISABLE_BANNER=1 ")


def test_the_router_is_the_line_behind_its_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "installed", lambda: True)
    wanted = experiment(model, "router+none", server=ServerOptions(num_blocks=9, block_size=32))
    _, server, front = part(shown(wanted, tmp_path / "out"), "router+none").splitlines()
    assert server.endswith(" &")
    line, port = shlex.split(front), shlex.split(server)[shlex.split(server).index("--port") + 1]
    assert line[-1] == f"http://127.0.0.1:{port}"
    assert '"token_capacity_per_dp_rank": 256' in front


def test_runs_that_are_done_say_how_long_the_others_take(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "runs" / "01-none"
    results.write_run(folder, Run(name="01-none", state="done", server_start_s=100, wall_s=200))
    told = shown(experiment(model, "none", repeats=3), tmp_path / "out")
    assert "Runs: 3, 1 of them done" in told
    assert "Time: 10 minutes more" in told


def test_it_refuses_what_the_run_would_refuse(model: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text('{"seed": 7}')
    with pytest.raises(ResultError, match="another experiment"):
        shown(experiment(model, "none"), tmp_path)
    short = experiment(model, "none", server=ServerOptions(max_model_len=107))
    for begin in (
        lambda: shown(short, tmp_path / "out"),
        lambda: run_all({tmp_path / "out": short}),
    ):
        with pytest.raises(ResultError, match=r"has 108 tokens .* takes 107; give --max-len 108"):
            begin()
    assert not (tmp_path / "out").exists()
    experiment(model, "none", server=ServerOptions(max_model_len=108)).check_length()
