"""Servers use the installed package, unless the checkout can run itself; a run writes down which
packages its server found, and the GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.serve import package as packages
from bench.serve import page, results, rivals, server
from bench.serve.package import LIBRARY, python_path
from bench.serve.record import machine
from bench.serve.server import ServerError, ServerOptions, VllmServer
from bench.tests.ab_results import measured, run_of
from bench.tests.fake_server import FakeApi
from bench.tests.test_serve_ab import api, experiment, model, ran  # two of them are fixtures
from bench.tests.test_serve_arms import install

__all__ = ["api", "model"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return package(tmp_path / "checkout", library=False)


def package(folder: Path, library: bool) -> Path:
    """A package of this name that says where it was imported from."""
    library_at = folder / LIBRARY
    library_at.parent.mkdir(parents=True)
    (library_at.parents[1] / "__init__.py").write_text("print(__file__)")
    if library:
        library_at.touch()
    return folder


def told(folder: Path, name: str, version: int) -> None:
    """The record of a package that pip installed there."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    record = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(record)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages where pip installed it, found before any other."""
    folder = package(tmp_path / "site", library=True)
    told(folder, "continuum-connector", 9)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_checkout_without_the_library_does_not_hide_the_installed_package(
    checkout: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = os.pathsep.join([str(checkout), "/shims"])
    assert python_path(given, checkout) == "/shims"
    monkeypatch.chdir(checkout)
    assert python_path(os.pathsep.join(["", ".", "/shims"]), checkout) == "/shims"


def test_a_checkout_with_the_library_is_used_and_shims_stay_in_front(
    checkout: Path, site: Path
) -> None:
    (checkout / LIBRARY).touch()
    assert python_path("/shims", checkout) == f"/shims{os.pathsep}{checkout}"
    assert python_path(str(checkout), checkout) == str(checkout)


def test_an_editable_install_is_the_checkout(checkout: Path, site: Path) -> None:
    said = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    (site / "continuum_connector-9.dist-info" / "direct_url.json").write_text(json.dumps(said))
    assert python_path("", checkout) == str(checkout)


def test_a_checkout_is_better_than_nothing(checkout: Path, site: Path) -> None:
    (site / LIBRARY).unlink()
    assert python_path("", checkout) == str(checkout)


def test_a_server_imports_neither_from_the_folder_that_it_is_started_in(
    checkout: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `python -m` does in a clone: the folder comes first, whatever PYTHONPATH says."""
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(
        server.ServerOptions,
        "command",
        # -S: an editable install of this package would be found before any path.
        lambda *_: [sys.executable, "-S", "-c", "import continuum_connector"],
    )
    monkeypatch.setattr(server, "python_path", lambda given: str(site))
    started = VllmServer(Path("model"), log=tmp_path / "logs" / "log")
    with pytest.raises(ServerError, match="status 0"):
        started.start()
    assert started.log.read_text().splitlines()[-1] == str(
        site / "continuum_connector" / "__init__.py"
    )


def test_a_model_of_this_folder_is_found_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    line = ServerOptions().command(Path("model"), 1)
    assert str(tmp_path / "model") in line
    assert "org/name" in ServerOptions().command(Path("org/name"), 1)


# --- what a run writes down of where it ran ----------------------------------------------------
def smi(folder: Path, script: str) -> None:
    """An nvidia-smi that does what is said."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_run_names_the_lmcache_that_its_server_had(
    api: FakeApi, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rivals"
    told(folder, "lmcache", 7)
    told(tmp_path / "site", "lmcache", 6)
    install(folder, *rivals.packages(on_cpu=False)[1:])
    monkeypatch.setattr(packages, "on_cpu", lambda: False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    server = ServerOptions(block_size=16)
    wanted = experiment(model, "lmcache-v1", server=server, rivals=folder)
    (run,) = ran(tmp_path / "out", wanted)
    assert run.run.versions["lmcache"] == "7"


def test_the_gpu_is_named_and_shown_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    smi(tmp_path, "echo 'NVIDIA H100, 570.1, 81559 MiB'")
    told = machine()
    assert told["gpu"] == "NVIDIA H100, 570.1, 81559 MiB"
    run = results.load_run(measured(tmp_path, run_of("none", machine=told), 1.0))
    assert page._machine(run).endswith("cores, NVIDIA H100, 570.1, 81559 MiB")


@pytest.mark.parametrize("script", ["", "echo no devices; exit 6"])
def test_where_no_gpu_is_seen_none_is_named(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        smi(tmp_path, script)
    assert "gpu" not in machine()
