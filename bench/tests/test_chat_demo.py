"""bench/chat: the demo over a small API in the place of real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chat import demo
from bench.serve import results
from bench.tests.fake_server import FakeApi, Trouble
from bench.tests.test_serve_ab import api, model  # fixtures

__all__ = ["api", "model"]
SMALL = ["--programs", "2", "--turns", "2", "--rate", "1000"]


@pytest.fixture(autouse=True)
def no_pauses(api: FakeApi, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    api.metrics = "continuum:tier_up 1\n"  # else ours would be said to run without its DRAM
    monkeypatch.setattr(demo, "make_model", lambda: model)
    monkeypatch.setattr("bench.chat.agents.PAUSES", 0.0)
    return


def test_the_demo_compares_two_servers_and_keeps_every_turn(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "chat of 2 programs x 2 turns, pool of " in printed
    assert "yes (4/4)" in printed
    runs = results.load(tmp_path)
    assert [run.run.arm for run in runs] == ["none", "continuum:adaptive"]
    for run in runs:
        assert sorted((turn.program, turn.turn) for turn in run.turns) == [
            (f"agent-0{program}", turn) for program in (0, 1) for turn in (0, 1)
        ]
        assert all(turn.text for turn in run.turns)
    asked = [[m["content"] for m in r["messages"]] for r in api.requests if "messages" in r]
    assert sorted(asked[:4]) == sorted(asked[4:])  # both were asked the same


def test_a_turn_that_fails_is_told_with_status_1(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def gate(body: dict[str, object]) -> Trouble | None:
        return Trouble(status=400) if len(api.requests) == 8 else None

    api.gate = gate
    assert demo.main([*SMALL, "--out", str(tmp_path)]) == 1
    assert "Continuum adaptive: agent-0" in capsys.readouterr().err


def test_an_answer_that_differs_is_told_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main([*SMALL, "--out", str(tmp_path)])
    path = results.load(tmp_path)[0].folder / results.TURNS
    path.write_text(path.read_text().replace('"text":" a', '"text":" b', 1))
    assert demo.verdict(tmp_path) == 1
    assert "Continuum adaptive: 1 of 4 answers differ" in capsys.readouterr().err
