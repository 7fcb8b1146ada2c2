"""The runner of arms: order, resuming, arms that cannot run, a dry run, which shows what would be
started and refuses what would be refused; servers are a small API here."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.common.plans import Added
from bench.serve import cli_ab, compare, kept, package, results, rivals, router, session
from bench.serve.ab import Experiment, cells, check_folder, prepare, run_all
from bench.serve.aiperf import Aiperf
from bench.serve.api import Patience
from bench.serve.arms import CannotRunError, Place, ServerArm, Setup, find_arm
from bench.serve.load import ClientError
from bench.serve.preview import preview
from bench.serve.programs import Defaults, Uniform
from bench.serve.results import Loaded, ResultError, Run
from bench.serve.router import Router
from bench.serve.server import ServerError, ServerOptions, VllmServer
from bench.tests.fake_server import FakeApi, Trouble, fake_server
from bench.tests.test_serve_arms import install
from continuum_connector.errors import ToldError

SMALL = Uniform("small", "p", (Added(60, 4), Added(40, 4)), 0, Defaults("turns", programs=3))
KV_BYTES = 2 * 2 * 4 * 8 * 4
IMPATIENT = Patience(backoff_s=0.01)


class FakeVllm(VllmServer):
    """Every server is the one API; starts are noted, and no process is there."""

    url = ""
    said = "started"
    started: list[tuple[str, ServerOptions]]
    broken: set[str]

    def start(self) -> None:
        if any(self.name.startswith(each) for each in FakeVllm.broken):
            raise ServerError("ended with status 1\nValueError: no room\nLog: x")
        self.log.write_text(self.said)
        FakeVllm.started.append((self.name, self.options))

    def healthy(self) -> bool:
        return True

    def cause(self) -> str:
        return "EngineDeadError"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """Every server an arm starts."""
    with fake_server() as server:
        monkeypatch.setattr(FakeVllm, "url", server.url)
        monkeypatch.setattr(FakeVllm, "started", [], raising=False)
        monkeypatch.setattr(FakeVllm, "broken", set(), raising=False)
        monkeypatch.setattr(kept, "VllmServer", FakeVllm)
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with nothing but what sizes KV."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    return folder


def experiment(model: Path, *arms: str, **fields: Any) -> Experiment:
    chosen = tuple(find_arm(arm) for arm in arms)
    return Experiment(chosen, SMALL, model, **fields)


def ran(out: Path, wanted: Experiment) -> list[Loaded]:
    """What is in the folder when no run is missing."""
    assert run_all({out: wanted}) == "done"
    return results.load(out)


def test_arms_alternate_and_those_without_dram_run_once_per_repeat(model: Path) -> None:
    planned = cells(experiment(model, "none", "continuum", pressures=(1.0, 2.0), repeats=3))
    assert [cell.name for cell in planned] == [
        "01-none",
        "01-continuum-adaptive-1x",
        "01-continuum-adaptive-2x",
        "02-continuum-adaptive-1x",
        "02-none",
        "02-continuum-adaptive-2x",
        "03-none",
        "03-continuum-adaptive-1x",
        "03-continuum-adaptive-2x",
    ]


def test_dram_is_what_all_programs_keep_alive_divided_by_the_pressure(model: Path) -> None:
    live = 3 * (60 + 4 + 40 + 4) * KV_BYTES
    (cell,) = cells(experiment(model, "continuum", pressures=(0.5,)))
    assert cell.dram is not None
    assert (cell.dram.live_bytes, cell.dram.bytes, cell.dram.pressure) == (live, 2 * live, 0.5)
    (cell,) = cells(experiment(model, "continuum", pressures=(1.0,), dram_bytes=live // 4))
    assert cell.dram is not None
    assert cell.dram.pressure == 4.0


def test_every_arm_gets_the_same_requests_and_each_repeat_its_own(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    wanted = experiment(model, "none", "none-priority", repeats=2)
    runs = {run.run.name: run for run in ran(tmp_path, wanted)}
    assert [run.run.order for run in runs.values()] == [0, 1, 2, 3]
    answers = {name: [turn.answer for turn in run.turns] for name, run in runs.items()}
    assert answers["01-none"] == answers["01-none-priority"] != answers["02-none"]
    assert all((run.folder / results.LOG).read_text() == "started" for run in runs.values())
    base, other = compare.columns(runs.values())
    assert str(compare.sameness(base, other)) == "yes (12/12)"
    with_priority = [request for request in api.requests if "priority" in request]
    assert [request["priority"] for request in with_priority[:3]] == [0, 1, 2]


class FakeRouter(Router):
    """Another API, in front of the one that every server is."""

    at = ""
    alive_after = True

    def start(self) -> None:
        self.url = FakeRouter.at
        self.log.write_text("out of files")

    def alive(self) -> bool:
        return self.alive_after


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """The router of every arm that has one."""
    with fake_server() as server:
        monkeypatch.setattr(FakeRouter, "at", server.url)
        monkeypatch.setattr(kept, "Router", FakeRouter)
        monkeypatch.setattr(router, "installed", lambda: True)
        yield server


def test_what_is_behind_the_router_is_asked_through_it_by_the_programs_name(
    api: FakeApi, front: FakeApi, model: Path, tmp_path: Path
) -> None:
    api.metrics = "of_the_server 1\n"
    behind, plain = ran(tmp_path, experiment(model, "router+none", "none"))
    assert [turn.answer for turn in plain.turns] == [turn.answer for turn in behind.turns]
    warm_up, one_more = "", ""
    names = [turn.program for turn in behind.turns]
    assert front.sessions == [warm_up, *names, one_more]
    assert set(api.sessions) == {""}
    assert len(api.requests) == len(plain.turns) + 2
    assert "--enable-program-scheduling" in behind.run.front
    assert behind.run.front[-1] == api.url
    assert not plain.run.front
    assert "of_the_server" in (behind.folder / results.AFTER).read_text()


def test_a_router_that_ended_under_load_is_a_run_that_died(
    api: FakeApi, front: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRouter, "alive_after", False)
    (run,) = ran(tmp_path, experiment(model, "router+none"))
    assert run.run.state == "died"
    assert run.run.reason.startswith("the router ended: out of files (log: ")


def test_what_is_done_is_not_made_again(api: FakeApi, model: Path, tmp_path: Path) -> None:
    wanted = experiment(model, "none", "none-priority")
    first, half = ran(tmp_path, wanted)
    before = (first.folder / results.TURNS).read_bytes()
    half.run.state = "interrupted"
    results.write_run(half.folder, half.run)
    assert len(ran(tmp_path, wanted)[1].turns) == 6
    names = [name for name, _ in FakeVllm.started]
    assert names == ["01-none", "01-none-priority", "01-none-priority"]
    assert (first.folder / results.TURNS).read_bytes() == before
    runs = [each.run for each in ran(tmp_path, experiment(model, "none", repeats=2))]
    assert [(run.name, run.order) for run in runs[1:]] == [("01-none-priority", 1), ("02-none", 2)]


def rates(wanted: Experiment, out: Path) -> dict[Path, Experiment]:
    """Two loads on one server per arm, without pauses and with few programs."""
    return cli_ab.read_rates("50,100", replace(wanted, dram_bytes=2**30, programs=2), out)


def test_an_arms_server_serves_every_rate_and_forgets_in_between(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    api.refuses = 1  # a store under way
    wanted = experiment(model, "none", "simple", "lmcache-mp", patience=IMPATIENT)
    loads = rates(replace(wanted, arms=tuple(map(as_stock, wanted.arms))), tmp_path)
    assert run_all(loads) == "done"
    arms = ["none", "simple", "lmcache-mp", "lmcache-mp"]  # which keeps what it has
    names = [name for name, _ in FakeVllm.started]
    assert all(name.startswith(f"01-{arm}") for name, arm in zip(names, arms, strict=True)), names
    assert api.resets == ["reset_external=true"] * 3
    for out in loads:
        assert [run.run.state for run in results.load(out)] == ["done"] * 3
        assert all((run.folder / results.LOG).read_text() == "started" for run in results.load(out))
    run_all(loads)
    assert len(FakeVllm.started) == 4, "what is done stays"


def test_a_run_is_not_made_on_a_server_that_does_not_forget(
    api: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RESETS", 2)
    api.refuses = 2
    loads = rates(experiment(model, "none", patience=IMPATIENT), tmp_path)
    run_all(loads)
    first, second = (results.load(out)[0].run for out in loads)
    assert (first.state, second.state) == ("done", "cannot_run")
    assert "did not empty its caches" in second.reason


def test_rates_need_a_size_of_dram_and_say_the_arrivals(model: Path, tmp_path: Path) -> None:
    for wanted in (experiment(model, "none"), experiment(model, "none", arrivals="turns")):
        with pytest.raises(ToldError, match=r"write --dram as a size, like 64GiB"):
            cli_ab.read_rates("1,3", wanted, tmp_path)


def as_stock(arm: ServerArm) -> ServerArm:
    return replace(arm, setup=lambda place: Setup())


def test_another_experiment_is_refused_in_the_same_folder(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    wanted = experiment(model, "none")
    run_all({tmp_path: wanted})
    server = replace(wanted.server, eager=False, max_num_seqs=7)
    for other, differ in (
        (replace(wanted, seed=1), "seed"),
        (replace(wanted, server=server), "seqs, eager"),
    ):
        with pytest.raises(ResultError, match=rf"\({differ} differ\)"):
            run_all({tmp_path: other})
    with pytest.raises(ResultError, match=r"\(client differ\)"):
        check_folder(asked_by_aiperf(model), tmp_path)


def test_an_arm_that_cannot_run_says_why_and_the_others_go_on(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    FakeVllm.broken.add("01-none-priority")
    wanted = experiment(model, "simple", "lmcache-mp", "none-priority", "none", rivals=tmp_path)
    runs = ran(tmp_path, wanted)
    assert [each.run.state for each in runs] == ["cannot_run"] * 3 + ["done"]
    assert "--shims" in runs[0].run.reason
    assert "bench.serve.rivals" in runs[1].run.reason
    assert runs[2].run.reason == "ended with status 1 ValueError: no room"
    cli_ab.show(cli_ab.Console(), runs, tmp_path, find_arm("none"))
    assert (tmp_path / "report.html").exists()


def test_a_server_that_dies_is_told_compared_with_nobody_and_run_again(
    api: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = experiment(model, "none")
    with monkeypatch.context() as patch:
        patch.setattr(FakeVllm, "healthy", lambda self: False)
        (run,) = ran(tmp_path, wanted)
    assert (run.run.state, run.run.reason) == ("died", "EngineDeadError")
    assert not compare.columns([run])
    console = cli_ab.Console(file=io.StringIO(), record=True, width=100)
    cli_ab.show(console, [run], tmp_path, find_arm("none"))
    said = "vLLM died, and is run again by the same command: EngineDeadError"
    assert said in console.export_text()
    assert [run.run.state for run in ran(tmp_path, wanted)] == ["done"]


@pytest.mark.parametrize(("healthy", "state"), [(True, "cannot_run"), (False, "died")])
def test_a_server_that_dies_in_the_warm_up_died_and_is_not_called_unable(
    api: FakeApi,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    healthy: bool,
    state: str,
) -> None:
    async def refuse(body: dict[str, Any]) -> Trouble:
        return Trouble(status=400)

    api.gate = refuse
    monkeypatch.setattr(FakeVllm, "healthy", lambda self: healthy)
    assert [run.run.state for run in ran(tmp_path, experiment(model, "none"))] == [state]


@pytest.mark.parametrize(
    ("tier", "arm", "what"),
    [("tier_up", "continuum", "DRAM tier"), ("disk_up", "continuum-disk", "disk")],
)
def test_our_arm_without_a_tier_of_its_own_is_reported_as_not_run(
    api: FakeApi,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    arm: str,
    what: str,
) -> None:
    said = f"WARNING No {what.removesuffix(' tier')} tier on this rank: there is no room"
    monkeypatch.setattr(FakeVllm, "said", said)
    for is_up, state in ((1, "done"), (0, "cannot_run")):
        lines = {"tier_up": 1, "disk_up": 1, tier: is_up}
        api.metrics = "".join(f'continuum:{key}{{engine="0"}} {n}\n' for key, n in lines.items())
        out = tmp_path / state
        ours, stock = ran(out, experiment(model, arm, "none", disk=tmp_path / "drive"))
        assert (ours.run.state, stock.run.state) == (state, "done")
        told = f"it served without its {what} (continuum:{tier} is 0). {said[8:]}"
        assert ours.run.reason == ("" if is_up else told)
        assert len(compare.columns([ours, stock])) == 1 + is_up


def test_ctrl_c_ends_the_experiment_and_the_next_call_goes_on(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    async def gate(body: dict[str, Any]) -> None:
        if len(api.requests) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    api.gate = gate
    wanted = experiment(model, "none", "none-priority")
    assert run_all({tmp_path: wanted}) == "interrupted"
    (run,) = results.load(tmp_path)
    assert (run.run.state, len(run.turns)) == ("interrupted", 2)
    assert {run.run.state for run in ran(tmp_path, wanted)} == {"done"}


def test_a_load_that_the_client_cannot_play_is_told_before_anything_starts(model: Path) -> None:
    with pytest.raises(ClientError, match="give --arrivals closed:N"):
        cells(asked_by_aiperf(model))
    assert len(cells(asked_by_aiperf(model, arrivals="closed:2"))) == 1


def asked_by_aiperf(model: Path, **fields: Any) -> Experiment:
    return experiment(model, "none", client=Aiperf(model, 32, version="0.13.0"), **fields)


class WritingVllm(FakeVllm):
    """Leaves a file on its disk, as a real one does; notes what lay there when it started."""

    found: list[list[str]]

    def start(self) -> None:
        folder = Path((self.options.connector or {})["disk_path"])
        WritingVllm.found.append([each.name for each in folder.iterdir()])
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "slab").touch()
        super().start()


def test_a_server_begins_on_an_empty_disk_and_nothing_of_it_is_left(
    api: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WritingVllm, "found", [], raising=False)
    monkeypatch.setattr(kept, "VllmServer", WritingVllm)
    api.metrics = "continuum:tier_up 1\ncontinuum:disk_up 1\n"
    wanted = experiment(model, "continuum-disk", disk=tmp_path / "drive", repeats=2)
    for cell in cells(wanted):
        left = prepare(wanted, cell)[1].disk
        assert left is not None
        left.mkdir(parents=True)
        (left / "by one that was killed").touch()
    assert [run.run.state for run in ran(tmp_path / "out", wanted)] == ["done", "done"]
    assert WritingVllm.found == [[], []]
    assert not list((tmp_path / "drive").iterdir())


def test_how_much_disk_there_is_makes_another_experiment_and_only_where_it_is_used(
    model: Path,
) -> None:
    assert experiment(model, "continuum-disk", disk_bytes=2**31).settings()["disk_bytes"] == 2**31
    assert "disk_bytes" not in experiment(model, "none", "continuum").settings()


# --- a dry run -------------------------------------------------------------------------------
def shown(wanted: Experiment, out: Path) -> str:
    return "\n".join(preview({out: wanted}))


def part(text: str, arm: str) -> str:
    return next(each for each in text.split("\n# ") if each.startswith(arm))


def test_it_shows_the_command_that_the_runner_then_starts(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    wanted = experiment(model, "none-priority", server=ServerOptions(args=["--seed", "1"]))
    told = shown(wanted, tmp_path)
    (run,) = ran(tmp_path, wanted)
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
    front: FakeApi, model: Path, tmp_path: Path
) -> None:
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
    for begin in (shown, lambda wanted, out: run_all({out: wanted})):
        with pytest.raises(ResultError, match=r"has 108 tokens .* takes 107; give --max-len 108"):
            begin(short, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    experiment(model, "none", server=ServerOptions(max_model_len=108)).check_length()
