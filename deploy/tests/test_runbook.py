"""What docs/runbook.md tells an operator to set or to delete, on the server that deploy/ starts."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from continuum_connector.config import load_config

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SETTINGS = (ROOT / "deploy" / "systemd" / "vllm.env").read_text()
BELOW = "# CONTINUUM_DISK_"  # a server without a disk has these lines as comments
_PARAGRAPH = re.compile(r"\*\*Switch off\.\*\*(?:.+\n)+")
_ROW = re.compile(r"^\|.*`CONTINUUM_.*\|$", re.MULTILINE)
ADVICE = [each[0] for pattern in (_PARAGRAPH, _ROW) for each in pattern.finditer(RUNBOOK)]


def told(text: str) -> dict[str, str]:
    """The variables that a text sets."""
    return dict(re.findall(r"\b(CONTINUUM_\w+)=([^\s`]*)", text))


@pytest.mark.parametrize("with_disk", [True, False], ids=["disk", "no disk"])
@pytest.mark.parametrize("advice", [each for each in ADVICE if told(each)])
def test_a_server_starts_with_what_the_runbook_says_to_set(advice: str, with_disk: bool) -> None:
    settings = SETTINGS.replace(BELOW, BELOW[2:]) if with_disk else SETTINGS
    before = told("\n".join(line for line in settings.splitlines() if not line.startswith("#")))
    assert ("CONTINUUM_DISK_PATH" in before) == with_disk
    config = load_config({}, before | told(advice))
    for name, value in told(advice).items():
        got = getattr(config, name.removeprefix("CONTINUUM_").lower())
        shown = f"{got:g}" if isinstance(got, float) else str(got)
        assert shown in (value, str(value != "0")), name


def test_each_alert_and_the_table_of_parts_are_there() -> None:
    assert len([each for each in ADVICE if each.startswith("|")]) >= 4
    assert len(ADVICE) > 15


def test_the_files_that_it_deletes_are_the_disks() -> None:
    [folder, files] = re.findall(r"^rm (\S+)/(\S+)", RUNBOOK, re.MULTILINE)[0]
    assert f"CONTINUUM_DISK_PATH={folder}\n" in SETTINGS
    assert fnmatch("dp0-rank3.slab", files)
    assert (
        'f"dp{self._place.engine}-rank{self._place.rank}.slab"'
        in (ROOT / "continuum_connector" / "worker" / "disk.py").read_text()
    )
