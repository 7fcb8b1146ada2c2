"""A small storm at a real server: every status expected, nothing held once it is idle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.storm import __main__ as command
from bench.storm.judge import Verdict


def test_a_small_storm_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "storm.json"
    status = command.main(["--smoke", "--json", str(out)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    written = json.loads(out.read_text())
    findings = {finding["what"]: finding["verdict"] for finding in written["findings"]}
    seen = ("statuses", "server", "answers", "connector", "ledger")
    assert {findings[name] for name in seen} == {Verdict.OK.value}
    statuses = written["servers"][0]["statuses"]
    assert {"200", "400", "hung up by us"} <= set(statuses)
    assert "Findings" in printed
