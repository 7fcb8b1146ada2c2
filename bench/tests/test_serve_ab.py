"""The runner of arms: order, resuming, arms that cannot run; servers are a small API here."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.common.plans import Added
from bench.serve import cli_ab, compare, kept, results, rivals, session
from bench.serve.ab import Experiment, Watcher, cells, run_all
from bench.serve.api import Patience
from bench.serve.arms import ARMS, CannotRunError, Place, ServerArm, Setup, find_arm
from bench.serve.cli_ab import read_dram, read_server_args
from bench.serve.commands import app
from bench.serve.fake_api import FakeApi, Trouble
from bench.serve.programs import Defaults, Uniform
from bench.serve.results import ResultError, Run
from bench.serve.rivals import LmcacheServer
from bench.serve.server import ServerError, ServerOptions, end_group
from bench.tests.fake_server import fake_server
from continuum_connector.tools.cli.server import CommandError

SMALL = Uniform("small", "p", (Added(60, 4), Added(40, 4)), 0, Defaults("turns", programs=3))
KV_BYTES = 2 * 2 * 4 * 8 * 4
IMPATIENT = Patience(backoff_s=0.01)


class FakeVllm:
    """Stands for VllmServer: every server is the one API, and starts are noted."""

    url = ""
    said = "started"
    start_s = 1.0
    port = 1
    started: list[tuple[str, ServerOptions]]
    broken: set[str]

    def __init__(self, model: Path, name: str, options: ServerOptions, log: Path) -> None:
        self.name = name
        self.options = options
        self.log = log

    def __enter__(self) -> FakeVllm:
        if any(self.name.startswith(each) for each in FakeVllm.broken):
            raise ServerError("ended with status 1\nValueError: no room\nLog: x")
        self.log.write_text(self.said)
        FakeVllm.started.append((self.name, self.options))
        return self

    def __exit__(self, *_: object) -> None: ...

    def healthy(self) -> bool:
        return True

    def cause(self) -> str:
        return "EngineDeadError"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """Every server an arm starts."""
    with fake_server() as server:
        use(monkeypatch, server)
        yield server


def use(monkeypatch: pytest.MonkeyPatch, server: FakeApi) -> None:
    """Make `server` what every arm starts."""
    monkeypatch.setattr(FakeVllm, "url", server.url)
    monkeypatch.setattr(FakeVllm, "started", [], raising=False)
    monkeypatch.setattr(FakeVllm, "broken", set(), raising=False)
    monkeypatch.setattr(kept, "VllmServer", FakeVllm)


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
    return Experiment(chosen, SMALL, model, sample_s=0.0, **fields)


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
    assert run_all({tmp_path / "out": wanted}, Watcher()) == "done"
    runs = {run.run.name: run for run in results.load(tmp_path / "out")}
    assert [run.run.order for run in runs.values()] == [0, 1, 2, 3]
    answers = {name: [turn.answer for turn in run.turns] for name, run in runs.items()}
    assert answers["01-none"] == answers["01-none-priority"] != answers["02-none"]
    assert all((run.folder / results.LOG).read_text() == "started" for run in runs.values())
    base, other = compare.columns(runs.values())
    assert str(compare.sameness(base, other)) == "yes (12/12)"
    with_priority = [request for request in api.requests if "priority" in request]
    assert [request["priority"] for request in with_priority[:3]] == [0, 1, 2]


def test_what_is_done_is_not_made_again(api: FakeApi, model: Path, tmp_path: Path) -> None:
    wanted = experiment(model, "none", "none-priority")
    run_all({tmp_path / "out": wanted}, Watcher())
    before = (tmp_path / "out/runs/01-none/turns.jsonl").read_bytes()
    half = tmp_path / "out/runs/01-none-priority"
    run = results.read_run(half)
    run.state = "interrupted"
    results.write_run(half, run)
    run_all({tmp_path / "out": wanted}, Watcher())
    assert [name for name, _ in FakeVllm.started] == [
        "01-none",
        "01-none-priority",
        "01-none-priority",
    ]
    assert (tmp_path / "out/runs/01-none/turns.jsonl").read_bytes() == before
    assert len(results.load_run(half).turns) == 6


def rates(wanted: Experiment, out: Path) -> dict[Path, Experiment]:
    """Two loads on one server per arm, without pauses and with few programs."""
    return cli_ab.read_rates("50,100", replace(wanted, dram_bytes=2**30, programs=2), out)


def test_an_arms_server_serves_every_rate_and_forgets_in_between(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    api.refuses = 1  # a store under way
    wanted = experiment(model, "none", "simple", "lmcache-mp", patience=IMPATIENT)
    loads = rates(replace(wanted, arms=tuple(map(as_stock, wanted.arms))), tmp_path)
    assert run_all(loads, Watcher()) == "done"
    arms = ["none", "simple", "lmcache-mp", "lmcache-mp"]  # which keeps what it has
    names = [name for name, _ in FakeVllm.started]
    assert all(name.startswith(f"01-{arm}") for name, arm in zip(names, arms, strict=True)), names
    assert api.resets == ["reset_external=true"] * 3
    for out in loads:
        assert [run.run.state for run in results.load(out)] == ["done"] * 3
        assert all((run.folder / results.LOG).read_text() == "started" for run in results.load(out))
    run_all(loads, Watcher())
    assert len(FakeVllm.started) == 4, "what is done stays"


def test_a_run_is_not_made_on_a_server_that_does_not_forget(
    api: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RESETS", 2)
    api.refuses = 2
    loads = rates(experiment(model, "none", patience=IMPATIENT), tmp_path)
    run_all(loads, Watcher())
    first, second = (results.load(out)[0].run for out in loads)
    assert (first.state, second.state) == ("done", "cannot_run")
    assert "did not empty its caches" in second.reason


def test_rates_need_a_size_of_dram_and_say_the_arrivals(model: Path, tmp_path: Path) -> None:
    for wanted in (experiment(model, "none"), experiment(model, "none", arrivals="turns")):
        with pytest.raises(CommandError, match=r"write --dram as a size, like 64GiB"):
            cli_ab.read_rates("1,3", wanted, tmp_path)


def as_stock(arm: ServerArm) -> ServerArm:
    return replace(arm, setup=lambda place: Setup())


def test_arms_that_come_later_are_compared_with_the_same_base(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    run_all({tmp_path / "out": experiment(model, "none-priority")}, Watcher())
    run_all({tmp_path / "out": experiment(model, "none")}, Watcher())
    runs = results.load(tmp_path / "out")
    assert [(run.run.arm, run.run.order) for run in runs] == [("none-priority", 0), ("none", 1)]
    assert [column.key[0] for column in compare.columns(runs, "none")] == ["none", "none-priority"]


def test_another_experiment_is_refused_in_the_same_folder(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    run_all({tmp_path / "out": experiment(model, "none")}, Watcher())
    with pytest.raises(ResultError, match=r"\(seed differ\)"):
        run_all({tmp_path / "out": experiment(model, "none", seed=1)}, Watcher())
    other = replace(experiment(model, "none").server, eager=False, max_num_seqs=7)
    with pytest.raises(ResultError, match=r"\(seqs, eager differ\)"):
        run_all({tmp_path / "out": experiment(model, "none", server=other)}, Watcher())


def test_an_arm_that_cannot_run_says_why_and_the_others_go_on(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    FakeVllm.broken.add("01-none-priority")
    told: list[Run] = []
    wanted = experiment(model, "simple", "lmcache-mp", "none-priority", "none", rivals=tmp_path)
    assert run_all({tmp_path / "out": wanted}, Watcher(ended=told.append)) == "done"
    assert [run.state for run in told] == ["cannot_run"] * 3 + ["done"]
    assert "--shims" in told[0].reason
    assert "bench.serve.rivals" in told[1].reason
    assert told[2].reason == "ended with status 1 ValueError: no room"
    cli_ab.show(
        cli_ab.Console(), results.load(tmp_path / "out"), tmp_path / "out", find_arm("none")
    )
    assert (tmp_path / "out" / "ratios.csv").exists()


def test_a_server_that_dies_is_told_compared_with_nobody_and_run_again(
    api: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, out = experiment(model, "none"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(FakeVllm, "healthy", lambda self: False)
        assert run_all({out: wanted}, Watcher()) == "done"
    (run,) = results.load(out)
    assert (run.run.state, run.run.reason) == ("died", "EngineDeadError")
    assert not compare.columns([run])
    console = cli_ab.Console(file=io.StringIO(), record=True, width=100)
    cli_ab.show(console, [run], out, find_arm("none"))
    said = "vLLM died, and is run again by the same command: EngineDeadError"
    assert said in console.export_text()
    run_all({out: wanted}, Watcher())
    assert [run.run.state for run in results.load(out)] == ["done"]


def test_a_server_that_dies_in_the_warm_up_died_and_is_not_called_unable(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(body: dict[str, Any]) -> Trouble:
        return Trouble(status=400)

    with fake_server(refuse) as server:
        use(monkeypatch, server)
        run_all({tmp_path / "able": experiment(model, "none")}, Watcher())
        monkeypatch.setattr(FakeVllm, "healthy", lambda self: False)
        run_all({tmp_path / "dead": experiment(model, "none")}, Watcher())
    states = [results.load(tmp_path / name)[0].run.state for name in ("able", "dead")]
    assert states == ["cannot_run", "died"]


@pytest.mark.parametrize(("is_up", "state"), [(1, "done"), (0, "cannot_run")])
def test_our_arm_without_its_dram_tier_is_reported_as_not_run(
    api: FakeApi,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_up: int,
    state: str,
) -> None:
    said = "WARNING No DRAM tier on this rank: the native library is not built"
    monkeypatch.setattr(FakeVllm, "said", said)
    api.metrics = f'continuum:tier_up{{engine="0"}} {is_up}\n'
    run_all({tmp_path / "out": experiment(model, "continuum", "none")}, Watcher())
    ours, stock = (run.run for run in results.load(tmp_path / "out"))
    assert (ours.state, stock.state) == (state, "done")
    assert ("the native library is not built" in ours.reason) == (not is_up)
    assert [c.key[0] for c in compare.columns(results.load(tmp_path / "out"))] == (
        ["continuum:adaptive", "none"] if is_up else ["none"]
    )


def test_the_title_says_whose_kv_the_pressure_means(
    api: FakeApi, model: Path, tmp_path: Path
) -> None:
    api.metrics = "continuum:tier_up 1\n"
    wanted = experiment(model, "none", "continuum", arrivals="closed:2")
    run_all({tmp_path / "out": wanted}, Watcher())
    console = cli_ab.Console(file=io.StringIO(), record=True, width=160)
    cli_ab.show(console, results.load(tmp_path / "out"), tmp_path / "out", find_arm("none"))
    title = "live KV of the 2 largest of 3 programs / DRAM = 2; ratios are to vLLM"
    assert title in console.export_text()


def test_ctrl_c_ends_the_experiment_and_the_next_call_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    async def gate(body: dict[str, Any]) -> None:
        seen.append(1)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with fake_server(gate) as server:
        use(monkeypatch, server)
        wanted = experiment(model, "none", "none-priority")
        assert run_all({tmp_path / "out": wanted}, Watcher()) == "interrupted"
        (run,) = results.load(tmp_path / "out")
        assert (run.run.state, len(run.turns)) == ("interrupted", 2)
        assert run_all({tmp_path / "out": wanted}, Watcher()) == "done"
    assert {r.run.state for r in results.load(tmp_path / "out")} == {"done"}


def install(folder: Path, *requirements: str) -> None:
    """What pip leaves behind of them."""
    for each in requirements:
        name = each.replace("-", "_").replace("==", "-")
        (folder / f"{name}.dist-info").mkdir(exist_ok=True)


def setup_of(arm: str, tmp_path: Path, **place: Any) -> Setup:
    install(tmp_path, *rivals.packages(place.get("on_cpu", True)))
    for name in ("cpu_lmcache_v1", "cpu_native_shim"):
        (tmp_path / f"{name}.py").touch()
    fields = {"on_cpu": True, "rivals": tmp_path, "shims": tmp_path, **place}
    return find_arm(arm).setup(Place(dram_bytes=2**30, block_size=128, **fields))


@pytest.mark.parametrize("name", [*ARMS, "continuum", "continuum:fixed_ttl"])
def test_every_arm_can_be_set_up(name: str, tmp_path: Path) -> None:
    on_cpu, on_gpu = setup_of(name, tmp_path), setup_of(name, tmp_path, on_cpu=False, shims=None)
    for setup in (on_cpu, on_gpu):
        config = setup.kv_transfer_config or {"kv_connector": "", "kv_connector_extra_config": {}}
        shimmed = "kv_connector_module_path" in config
        assert shimmed == config["kv_connector"].endswith("Cpu")
        assert not (setup is on_gpu and shimmed)
        if name.startswith("lmcache"):
            assert setup.env["LMCACHE_TRACK_USAGE"] == "false"
            assert str(tmp_path) in setup.env["PYTHONPATH"]


@pytest.mark.parametrize("cupy", ["cupy-cuda13x==14.2.0", "cupy-cuda12x==13.6.0"])
def test_elsewhere_any_versions_will_do_but_all_packages_must_be_there(
    tmp_path: Path, cupy: str
) -> None:
    on_gpu = Place(2**30, 128, on_cpu=False, rivals=tmp_path)
    others = [f"{each.partition('==')[0]}==1.0" for each in rivals.PACKAGES]
    install(tmp_path, "lmcache-cli==1.0", *others[1:])
    assert rivals.missing(tmp_path, on_cpu=True) == ["lmcache"]
    install(tmp_path, *others)
    assert not rivals.missing(tmp_path, on_cpu=True)
    with pytest.raises(CannotRunError, match=r"which lacks cupy-cuda\*; install it with"):
        find_arm("lmcache-mp").setup(on_gpu)
    install(tmp_path, cupy)
    assert find_arm("lmcache-mp").setup(on_gpu).side is not None


def test_our_folder_is_ours_by_whatever_path_and_must_have_our_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rivals").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "rivals")
    monkeypatch.setattr(rivals, "FOLDER", tmp_path / "rivals")
    monkeypatch.chdir(tmp_path)
    install(tmp_path / "rivals", "lmcache==0.5.5", *rivals.packages(on_cpu=False)[1:])
    for folder in (tmp_path / "rivals", tmp_path / "link", Path("rivals")):
        assert rivals.missing(folder, on_cpu=False) == ["lmcache==0.5.6"]


def test_each_arm_gets_the_same_bytes_of_dram(tmp_path: Path) -> None:
    def extra(arm: str) -> Any:
        return (setup_of(arm, tmp_path).kv_transfer_config or {})["kv_connector_extra_config"]

    assert setup_of("continuum", tmp_path).connector == {
        "policy": "adaptive",
        "dram_bytes": 2**30,
    }
    for arm in ("simple", "simple-lazy", "offloading-lru", "offloading-arc"):
        assert extra(arm)["cpu_bytes_to_use"] == 2**30
    assert extra("simple-lazy")["lazy_offload"] is True
    assert extra("offloading-arc")["eviction_policy"] == "arc"
    assert extra("lmcache-mp-lazy")["lmcache.mp.lazy_offload"] is True
    side = setup_of("lmcache-mp", tmp_path).side
    assert side is not None
    assert side.command[side.command.index("--l1-size-gb") + 1] == "1.000000000"
    assert extra("lmcache-mp")["lmcache.mp.port"] != side.port  # each setup has its own server
    assert setup_of("lmcache-v1", tmp_path).env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "1.000000000"


def test_blocks_that_do_not_divide_a_chunk_are_refused() -> None:
    with pytest.raises(CannotRunError, match="no multiple of --block-size 96"):
        Place(1, 96, on_cpu=True, rivals=Path()).chunk()


def test_an_lmcache_server_that_ends_at_once_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LmcacheServer(2**20, 128, on_cpu=True, env={})
    name = server.command[server.command.index("--shm-name") + 1]
    left = tmp_path / f"lmcache_l1_pool_{name}"
    left.touch()
    monkeypatch.setattr(rivals, "SHM", tmp_path)
    server.command = [sys.executable, "-c", "raise SystemExit('no eviction policy')"]
    server.log = tmp_path / "log"
    with pytest.raises(ServerError, match="status 1: no eviction policy"):
        server.__enter__()
    assert not left.exists()


def test_a_side_process_is_gone_with_its_children(tmp_path: Path) -> None:
    grandchild = "trap '' INT; echo $$; exec sleep 600"
    child = f"import subprocess; subprocess.Popen(['sh', '-c', {grandchild!r}]).wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdecimal()
    end_group(process, grace_s=5.0)
    # The pipe ends when the last process that holds it does.
    assert select.select([process.stdout], [], [], 60.0)[0]
    assert process.stdout.read() == ""
    process.stdout.close()


@pytest.mark.parametrize(
    ("text", "means"),
    [("2", ((2.0,), 0)), ("0.5,1,4", ((0.5, 1.0, 4.0), 0)), ("64GiB", ((1.0,), 64 * 2**30))],
)
def test_dram_is_a_pressure_or_a_size(text: str, means: Any) -> None:
    assert read_dram(text) == means


@pytest.mark.parametrize("text", ["", "0", "-1", "much", "64GB", "1,x"])
def test_other_drams_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--dram"):
        read_dram(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--max-model-len 16384", "--max-model-len is not taken here; use --max-len"),
        ("--seed 1 --max_model_len=16384", "--max-model-len is not taken here; use --max-len"),
        ("--num-gpu-blocks-override 9", "--num-gpu-blocks-override is not .* use --blocks"),
    ],
)
def test_what_decides_whether_contexts_fit_is_not_said_to_the_server_alone(
    text: str, said: str
) -> None:
    done = CliRunner().invoke(app, ["ab", "--dry-run", "--server-args", text])
    assert done.exit_code == 1
    assert re.search(said, done.stderr)


def test_other_server_args_are_taken_as_a_shell_takes_them() -> None:
    assert read_server_args("--load-format dummy --x 'a b'") == [
        "--load-format",
        "dummy",
        "--x",
        "a b",
    ]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"vocab_size": 128_256}, "1000:30000"),
        ({"vocab_size": 2048}, "1000:2048"),
        ({"vocab_size": 500}, "250:500"),
        ({}, "1000:30000"),
    ],
)
def test_only_ids_that_the_model_knows_are_sent(
    tmp_path: Path, config: dict[str, int], ids: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli_ab.known_ids(tmp_path) == ids


@pytest.mark.parametrize("name", ["lmcache", "continuum:best", ""])
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(KeyError):
        find_arm(name)
    assert isinstance(find_arm("none"), ServerArm)
