"""Each arm: what its server is started with, what it needs, and the words that name it."""

from __future__ import annotations

import json
import math
import re
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.common.arms import is_ours
from bench.serve import cli_ab, rivals, router
from bench.serve.arms import ARMS, CannotRunError, Place, Setup, find_arm
from bench.serve.cli_ab import read_dram, read_server_args, read_size
from bench.serve.commands import app
from bench.serve.rivals import LmcacheServer
from bench.serve.server import ServerError, end_group
from continuum_connector.config import load_config
from continuum_connector.errors import ToldError


def install(folder: Path, *requirements: str) -> None:
    """What pip leaves behind of them."""
    for each in requirements:
        name = each.replace("-", "_").replace("==", "-")
        (folder / f"{name}.dist-info").mkdir(exist_ok=True)


def setup_of(arm: str, tmp_path: Path, **place: Any) -> Setup:
    install(tmp_path, *rivals.packages(place.get("on_cpu", True)))
    for name in ("cpu_lmcache_v1", "cpu_native_shim"):
        (tmp_path / f"{name}.py").touch()
    disk = {"disk": tmp_path / "disk", "disk_bytes": 2**32}
    fields = {"on_cpu": True, "rivals": tmp_path, "shims": tmp_path, **disk, **place}
    return find_arm(arm).setup(Place(dram_bytes=2**30, block_size=128, **fields))


@pytest.mark.parametrize("name", [*ARMS, "continuum", "continuum-disk:fixed_ttl"])
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
def test_any_versions_will_do_but_all_packages_must_be_there(tmp_path: Path, cupy: str) -> None:
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


def extra(setup: Setup) -> dict[str, Any]:
    """What a rival's connector is told."""
    return dict((setup.kv_transfer_config or {})["kv_connector_extra_config"])


OURS = {"policy": "adaptive", "dram_bytes": 2**30}


def test_each_arm_gets_the_same_bytes_of_dram(tmp_path: Path) -> None:
    assert setup_of("continuum", tmp_path).connector == OURS
    for arm, more in {
        "simple": {},
        "simple-lazy": {"lazy_offload": True},
        "offloading-lru": {"eviction_policy": "lru"},
        "offloading-arc": {"eviction_policy": "arc"},
    }.items():
        assert extra(setup_of(arm, tmp_path)) == {"cpu_bytes_to_use": 2**30, **more}
    assert extra(setup_of("lmcache-mp-lazy", tmp_path))["lmcache.mp.lazy_offload"] is True
    side = setup_of("lmcache-mp", tmp_path).side
    assert side is not None
    assert side.command[side.command.index("--l1-size-gb") + 1] == "1.000000000"
    other = extra(setup_of("lmcache-mp", tmp_path))
    assert other["lmcache.mp.port"] != side.port  # each setup has its own server
    assert setup_of("lmcache-v1", tmp_path).env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "1.000000000"


def test_each_arm_with_a_disk_gets_a_folder_of_its_own_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    arms = ("continuum-disk", "offloading-fs", "lmcache-mp-disk")
    ours, tiering, lmcache = (setup_of(arm, tmp_path) for arm in arms)
    assert {each.disk for each in (ours, tiering, lmcache)} == {folder}
    assert ours.connector == {**OURS, "disk_path": str(folder), "disk_bytes": 2**32}
    assert extra(tiering) == {
        "cpu_bytes_to_use": 2**30,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    assert lmcache.side is not None
    disk = json.loads(lmcache.side.command[lmcache.side.command.index("--l2-adapter") + 1])
    assert (disk["base_path"], disk["max_capacity_gb"]) == (str(folder), 4.0)
    for arm in arms:
        assert find_arm(arm).uses_disk
        with pytest.raises(CannotRunError, match="--disk-path"):
            setup_of(arm, tmp_path, disk=None)
    assert setup_of("continuum", tmp_path).disk is None


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
    with pytest.raises(ServerError, match="status 1 while starting: no eviction policy"):
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


@pytest.mark.parametrize("text", ["", "0", "-1", "-1GiB", "much", "1,x", "2000000TiB"])
def test_other_drams_and_disks_are_refused(text: str) -> None:
    with pytest.raises(ToldError, match="--dram"):
        read_dram(text)
    with pytest.raises(ToldError, match=r"--disk .*: write a size, like 64GiB"):
        read_size("--disk", text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
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
    assert read_server_args("--load-format x 'a b'") == ["--load-format", "x", "a b"]


def test_one_of_ours_may_have_keys_of_its_own(tmp_path: Path) -> None:
    name = "continuum-disk+gate_wait_s=inf+ttl_s=3"
    arm = find_arm(name)
    assert arm.name == "continuum-disk:adaptive+gate_wait_s=inf+ttl_s=3"
    assert arm.title == "Continuum adaptive, disk, gate_wait_s=inf, ttl_s=3"
    config = load_config(setup_of(name, tmp_path).connector, environ={})
    assert (config.gate_wait_s, config.ttl_s, config.dram_bytes) == (math.inf, 3.0, 2**30)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("continuum+gate_wait=3", "did you mean `gate_wait_s`"),
        ("continuum+gate_wait_s", "gate_wait_s"),
        ("continuum:fixed_ttl+ttl_s=-1", "ttl_s = '-1' does not fit"),
        ("continuum+dram_bytes=1GiB", "say it with --dram"),
        ("continuum+policy=stock", "or :POLICY"),
    ],
)
def test_keys_that_no_arm_can_have_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(ToldError, match=re.escape(sentence)):
        cli_ab._arm(name)


@pytest.fixture(autouse=True)
def with_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "installed", lambda: True)


@pytest.mark.parametrize(
    ("name", "whole", "title"),
    [
        ("router+none", "router+none", "vLLM behind the router"),
        ("router:4096+none", "router:4096+none", "vLLM behind the router (4,096 tokens)"),
        (
            "router+continuum+gate_wait_s=30",
            "router+continuum:adaptive+gate_wait_s=30",
            "Continuum adaptive, gate_wait_s=30 behind the router",
        ),
    ],
)
def test_any_arm_may_have_the_router_in_front(
    tmp_path: Path, name: str, whole: str, title: str
) -> None:
    arm, behind = find_arm(name), find_arm(name.partition("+")[2])
    assert (arm.name, arm.title) == (whole, title)
    assert (arm.uses_dram, arm.uses_disk) == (behind.uses_dram, behind.uses_disk)
    assert arm.routed
    assert not arm.forgets, "it knows the programs of the load before"
    assert not is_ours(arm.name)
    setup = setup_of(name, tmp_path, vram_tokens=2048)
    config = json.loads(setup.front[setup.front.index("--program-scheduling-config-json") + 1])
    assert config["program_scheduling_enable_key"] == "auto"
    assert config["token_capacity_per_dp_rank"] == (4096 if ":" in name.split("+")[0] else 2048)
    assert replace(setup, front=()) == setup_of(behind.name, tmp_path)


def test_a_router_that_is_not_there_or_not_told_what_vram_holds_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotRunError, match=r"write it: router:TOKENS\+continuum"):
        setup_of("router+continuum", tmp_path)
    assert setup_of("router:64+continuum", tmp_path).front
    monkeypatch.setattr(router, "installed", lambda: False)
    with pytest.raises(CannotRunError, match=r"router\+none has it in front; install it with: pip"):
        setup_of("router+none", tmp_path, vram_tokens=2048)


@pytest.mark.parametrize(
    "name",
    [
        *("lmcache", "continuum:best", "none+ttl_s=3", ""),
        *("router", "router+", "router:0+none", "router:+none", "router:many+none"),
        *("router+router+none", "router+nobody"),
    ],
)
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(KeyError):
        find_arm(name)
