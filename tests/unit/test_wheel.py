"""The wheel: one per platform, for every Python; what the build backend itself says it would be."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

build = pytest.importorskip("scikit_build_core.build")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux")
def test_the_wheel_fits_every_python_and_this_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name = build.prepare_metadata_for_build_wheel(str(tmp_path))  # asks for no compiler
    lines = (tmp_path / name / "WHEEL").read_text().splitlines()
    assert "Root-Is-Purelib: false" in lines
    [tag] = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    assert tag.startswith("py3-none-linux_")


def test_the_wheel_carries_the_bench_and_no_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    options = {"wheel.cmake": "false", "build-dir": str(tmp_path / "build")}  # files alone
    name = build.build_wheel(str(tmp_path), options)
    names = zipfile.ZipFile(tmp_path / name).namelist()
    assert "continuum_connector/_bench/bench/serve/commands.py" in names
    assert [each for each in names if "tests" in Path(each).parts] == []
