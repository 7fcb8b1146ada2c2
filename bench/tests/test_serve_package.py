"""Servers use the installed package, unless the checkout can run itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.serve import server
from bench.serve.package import LIBRARY, python_path
from bench.serve.server import ServerError, VllmServer


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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages where pip installed it, found before any other."""
    folder = package(tmp_path / "site", library=True)
    info = folder / "continuum_connector-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: continuum-connector\nVersion: 9\n")
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
    line = server.ServerOptions().command(Path("model"), 1)
    assert str(tmp_path / "model") in line
    assert "org/name" in server.ServerOptions().command(Path("org/name"), 1)
