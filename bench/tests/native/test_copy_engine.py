"""bench/copy_engine: every section runs at tiny sizes, and its tables say what was measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

from bench.copy_engine import run
from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Section, Target
from bench.copy_engine.rig import Rig, another_core, same_cores_afterwards, threads
from bench.tests.native.tiny import TINY


@pytest.mark.parametrize("name", run.ALL_SECTIONS)
def test_each_section_measures_and_fills_its_table(name: str) -> None:
    """Those of a device too, over the stand-in: only what torch does for them is not run."""
    said: list[str] = []
    with same_cores_afterwards():
        section = run.ALL_SECTIONS[name](Machine(), TINY, said.append)
    assert said
    assert_complete(section)


def assert_complete(section: Section) -> None:
    assert section.rows
    assert {len(row) for row in section.rows} == {len(section.header)}
    assert section.samples
    for name, samples in section.samples.items():
        assert samples, name
        assert all(math.isfinite(each) and each > 0 for each in samples), name
    assert section.title in section.markdown()


def test_main_prints_tables_and_writes_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "QUICK", TINY)
    out = tmp_path / "samples.json"
    assert run.main(["--quick", "--only", "submit", "--json", str(out), "--note", "shared"]) == 0
    printed = capsys.readouterr().out
    assert "shared" in printed
    assert "| at work |" in printed
    (section,) = json.loads(out.read_text())
    assert len(section["samples"]["1 blocks, 1 regions, at work"]) >= TINY.calls


def test_an_unknown_section_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--only", "submit,speed"])
    assert "'speed' is not a section; known: submit" in capsys.readouterr().err


def test_a_target_says_pass_or_fail_in_its_own_direction() -> None:
    assert str(Target("delay", 4.0, 5.0, "ms")) == "PASS  delay: 4.0 ms, aim <= 5"
    assert str(Target("delay", 6.0, 5.0, "ms")).startswith("FAIL")
    assert str(Target("rate", 6.0, 5.0, "GB/s", at_most=False)).startswith("PASS")
    assert str(Target("rate", 4.0, 5.0, "GB/s", at_most=False)).startswith("FAIL")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_measured_threads_share_no_core_with_the_caller() -> None:
    """The lane leaves the core of a pinned opener by itself: for the caller's, if it is let."""
    before, others = os.sched_getaffinity(0), threads()
    with same_cores_afterwards():
        with another_core():
            rig = Rig(Machine(), 8, 64).started()
        with rig:
            begun = {name_of(thread): thread for thread in threads() - others}
            assert "ckv-lane" in begun
            for name, thread in begun.items():
                assert not os.sched_getaffinity(thread) & os.sched_getaffinity(0), name
    assert os.sched_getaffinity(0) == before


def name_of(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
