"""Where the benchmarks keep what they make: never inside of an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cache import cache_folder


def test_of_a_checkout_it_is_the_checkouts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert cache_folder(tmp_path) == tmp_path / ".cache"


def test_of_an_installed_package_it_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder(tmp_path) == tmp_path / "x" / "continuum-connector"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder(tmp_path) == tmp_path / ".cache" / "continuum-connector"
