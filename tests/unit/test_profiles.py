"""What `make test` runs and leaves to CI and `make test-all`; a failure anywhere is told."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import BEFORE_A_RELEASE, ROOT, waits_for_a_release, waits_for_test_all

# Instead of Python: notes what it is called with, and ends as the test says, call by call.
PYTHON = """#!/usr/bin/env bash
echo "$@" >>calls
sed -n "$(wc -l <calls)p" statuses | (read -r status && exit "$status")
"""


def play(folder: Path, statuses: tuple[int, ...], *arguments: str) -> tuple[int, list[str]]:
    """The status of scripts/test where pytest ends with these; what pytest was called with."""
    (folder / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "test", folder / "scripts")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (folder / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    ended = subprocess.run([script, *arguments], timeout=60).returncode
    return ended, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("statuses", "status"),
    [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((5, 0), 0), ((0, 5), 0), ((5, 5), 5), ((1, 5), 1)],
)
def test_either_half_that_fails_fails_all_and_one_without_tests_does_not(
    statuses: tuple[int, int], status: int, tmp_path: Path
) -> None:
    ended, calls = play(tmp_path, statuses, "-k", "pins")
    assert ended == status
    assert [call.rsplit(maxsplit=3)[-3:] for call in calls] == [
        ["tests/versions", "-k", "pins"],
        ["tests/server", "-k", "pins"],
    ]


def test_who_names_files_gets_those_alone(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    assert play(tmp_path, (1,), "tests::a", "-x") == (1, ["-m pytest tests::a -x"])


@pytest.mark.parametrize(("option", "which"), [("--full", "full"), ("--ci", "not release")])
def test_all_files_are_spread_where_others_are_asked_for(
    option: str, which: str, tmp_path: Path
) -> None:
    status, (call,) = play(tmp_path, (0,), option, "-q")
    assert status == 0
    assert call.startswith(f"-m pytest -m {which} -n ")
    assert call.endswith(" tests/gpu -q")
    assert {"tests/versions", "tests/server", "tests/vllm"} <= set(call.split())


def test_who_names_files_of_the_rest_gets_those_alone(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    assert play(tmp_path, (0,), "--full", "tests") == (0, ["-m pytest -m full tests"])


def test_every_folder_of_tests_is_run() -> None:
    named = set(re.findall(r"[\w/]+", (ROOT / "scripts" / "test").read_text()))
    files = [path.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/test_*.py")]
    tops = {"/".join(file.parts[:2]) for file in files if file.parts[1:-1]}
    assert len(tops) > 7
    assert [top for top in sorted(tops) if top not in named] == []


@dataclass
class Item:
    path: Path
    fixturenames: tuple[str, ...]


@pytest.mark.parametrize(
    ("path", "uses", "waits"),
    [
        ("tests/server/test_pins.py", ("agents",), False),
        ("tests/server/test_dram_tier.py", ("agents", "stock"), False),
        ("tests/server/test_dram_tier.py", ("server_factory", "stock"), True),
        ("tests/server/test_dram_tier.py", ("server_factory", "agents"), True),
        ("tests/server/test_switch.py", ("server", "stock"), True),
        ("tests/versions/test_matrix.py", ("version", "capsys"), True),
        ("tests/versions/test_matrix.py", (), False),
        ("tests/native/test_sanitizers.py", ("tmp_path",), True),
        ("tests/native/test_sources.py", ("tmp_path",), False),
        ("tests/vllm/test_machine.py", (), False),
    ],
)
def test_what_is_left_to_test_all(path: str, uses: tuple[str, ...], waits: bool) -> None:
    assert (ROOT / path).is_file()
    assert waits_for_test_all(Item(ROOT / path, uses)) is waits  # type: ignore[arg-type]


def test_what_ci_leaves_out() -> None:
    for name in BEFORE_A_RELEASE:
        path = ROOT / "tests" / "server" / f"test_{name}.py"
        assert path.is_file()
        assert waits_for_a_release(Item(path, ()))  # type: ignore[arg-type]
    assert not waits_for_a_release(Item(ROOT / "tests/server/test_disk.py", ()))  # type: ignore[arg-type]
    assert not waits_for_a_release(Item(ROOT / "tests/unit/test_help.py", ()))  # type: ignore[arg-type]
