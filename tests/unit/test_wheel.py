"""The wheel: one per platform, for every Python; what the build backend itself says it would be."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
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


def test_the_archive_holds_what_the_wheels_maker_wants_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file at the root needs a line in sdist.exclude, or one in scripts/wheel."""
    monkeypatch.chdir(ROOT)
    loader = importlib.machinery.SourceFileLoader("wheel", str(ROOT / "scripts" / "wheel"))
    spec = importlib.util.spec_from_loader("wheel", loader)
    assert spec
    wheel = importlib.util.module_from_spec(spec)
    loader.exec_module(wheel)
    wheel.look_at_archive(tmp_path / build.build_sdist(str(tmp_path)))


@pytest.mark.full
@pytest.mark.skipif("TEST_WHEEL" not in os.environ, reason="120 MB of tools: TEST_WHEEL=1")
@pytest.mark.skipif(sys.platform != "linux", reason="wheels hold a library of Linux")
def test_a_wheel_for_every_linux_installs_where_nothing_else_is(tmp_path: Path) -> None:
    """`scripts/wheel --try`, of the Python that runs this."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    line = [sys.executable, ROOT / "scripts" / "wheel", "--out", tmp_path, "--try", here]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if "No matching distribution found" in done.stderr:
        pytest.skip("the tools that build it are not in this package index")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Python {here}: installed" in done.stdout
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux_2_28_" in wheel.name
    [archive] = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size < 8 << 20
