"""The net's parts are commands that there are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import net
from tests.versions.sources import ROOT, VERSIONS


@pytest.mark.parametrize("is_quick", [False, True])
def test_its_parts_are_modules_that_there_are_and_every_release_is_among_them(
    is_quick: bool,
) -> None:
    parts = net.parts(is_quick)
    for part in parts:
        assert importlib.util.find_spec(part.command[2]) is not None
    assert [f"machine {version}" for version in VERSIONS] == [
        part.name for part in parts if part.name.startswith("machine")
    ]
    assert all((ROOT / path).exists() for path in net.RENAMES)
    told = [line for line in (net.__doc__ or "").splitlines() if line.startswith("    ")]
    names = {line.split()[0] for line in told if "python -m" not in line}
    assert {part.name.split()[0] for part in parts} == names


def test_a_part_that_fails_is_said_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = net.Part("bad", [*net.module("json.tool"), "no such file"])
    assert not net.run(fails, tmp_path)
    assert "FAILED" in capsys.readouterr().out
    assert "no such file" in (tmp_path / "bad.txt").read_text()
    assert net.run(net.Part("good", net.module("this")), tmp_path)
    assert "Namespaces are one honking great idea" in capsys.readouterr().out
