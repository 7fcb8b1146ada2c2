"""What a run writes down of where it ran: packages as its server finds them, and the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve import package, page, results, rivals
from bench.serve.ab import run_all
from bench.serve.record import machine
from bench.serve.results import load_run
from bench.serve.server import ServerOptions
from bench.tests.ab_results import measured, run_of
from bench.tests.fake_server import fake_server
from bench.tests.test_serve_ab import experiment, sized_model, use
from bench.tests.test_serve_arms import install


def smi(folder: Path, script: str) -> None:
    """An nvidia-smi that does what is said."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def lmcache(folder: Path, number: str) -> str:
    """A folder that holds nothing but the record of an LMCache of this version."""
    info = folder / f"lmcache-{number}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lmcache\nVersion: {number}\n")
    return str(folder)


def test_a_run_names_the_lmcache_that_its_server_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(lmcache(tmp_path / "rivals", "7"))
    install(folder, *rivals.packages(on_cpu=False)[1:])
    monkeypatch.setattr(package, "on_cpu", lambda: False)
    monkeypatch.syspath_prepend(lmcache(tmp_path / "site", "6"))
    server = ServerOptions(block_size=16)
    wanted = experiment(sized_model(tmp_path), "lmcache-v1", server=server, rivals=folder)
    with fake_server() as api:
        use(monkeypatch, api)
        run_all({tmp_path / "out": wanted})
    (run,) = results.load(tmp_path / "out")
    assert run.run.versions["lmcache"] == "7"


def test_the_gpu_is_named_and_shown_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    smi(tmp_path, "echo 'NVIDIA H100, 570.1, 81559 MiB'")
    told = machine()
    assert told["gpu"] == "NVIDIA H100, 570.1, 81559 MiB"
    run = load_run(measured(tmp_path, run_of("none", machine=told), 1.0))
    assert page._machine(run).endswith("cores, NVIDIA H100, 570.1, 81559 MiB")


@pytest.mark.parametrize("script", ["", "echo no devices; exit 6"])
def test_where_no_gpu_is_seen_none_is_named(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        smi(tmp_path, script)
    assert "gpu" not in machine()
