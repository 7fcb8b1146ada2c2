"""scripts/setup and scripts/wheel say what they do while they do it, and when it went wrong."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def setup(folder: Path, command: str) -> str:
    """What `step "vLLM" COMMAND` of scripts/setup writes into a file; `$OUT` is its name."""
    script = (ROOT / "scripts" / "setup").read_text().replace('\nmain "$@"\n', "\n")
    copy, out = folder / "scripts" / "setup", folder / "out"
    copy.parent.mkdir()
    (folder / ".cache").mkdir()
    copy.write_text(f"{script}\nstep vLLM bash -c '{command}'\n")
    with out.open("w") as file:
        subprocess.run(
            ["bash", copy],
            env={"OUT": str(out), "REPORT_S": "0.1", "PATH": "/usr/bin:/bin"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
    return out.read_text()


def test_setup_says_in_a_file_what_it_begins_and_what_pip_does(tmp_path: Path) -> None:
    # The step ends once a reader of the file would know both.
    waits = 'echo "  Downloading torch.whl (195 MB)"; until grep -q "s: *Downloading torch" $OUT; '
    said = setup(tmp_path, waits + "do :; done").splitlines()
    assert said[0] == "  vLLM ..."
    assert "Downloading torch.whl (195 MB)" in said[1]
    assert said[-1].split() == ["vLLM", *said[-1].split()[-2:]]
    assert said[-1].endswith(" s")


def test_setup_says_what_failed_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    said = setup(tmp_path, "echo No matching distribution; exit 1")
    assert "failed after" in said
    assert "No matching distribution" in said
    assert "the whole log is in .cache/setup.log" in said


@pytest.fixture
def wheel() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("wheel", str(ROOT / "scripts" / "wheel"))
    spec = importlib.util.spec_from_loader("wheel", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_wheel_says_what_it_begins_and_ends(
    wheel: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with wheel.step("the archive"):
        assert capsys.readouterr().out == "  the archive ...\n"
        wheel.run([sys.executable, "-c", "print('a compiler at length')"])
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("  the archive ")
    assert line.endswith(" s")


def test_wheel_says_what_failed(wheel: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="failed, so there is no wheel"), wheel.step("the archive"):
        wheel.run([sys.executable, "-c", "raise SystemExit('no compiler')"])
    said = capsys.readouterr()
    assert "failed after" in said.out
    assert "no compiler" in said.err


def test_on_a_terminal_the_line_counts_the_seconds(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with wheel.step("the archive"):
        pass
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.split("\r")[-1].startswith("  the archive ")
