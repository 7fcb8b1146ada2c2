"""bench/chat: the demo over a small API in the place of real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.chat import demo
from bench.serve.metrics import Metrics, parse_metrics
from bench.serve.server import ServerOptions
from bench.tests.fake_server import fake_server


class FakeVllm:
    """Stands for VllmServer."""

    def __init__(self, _: Path, name: str, **fields: Any) -> None:
        self.log, self.options, self.start_s = Path(f"{name}.log"), ServerOptions(**fields), 1.5

    def __enter__(self) -> FakeVllm:
        self._stack = ExitStack()
        self._api = self._stack.enter_context(fake_server())
        self.url = self._api.url
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def post(self, path: str, body: Any = None) -> None:
        """A connector's counters travel with the next step."""
        self._told = len(self._api.prompts)

    def metrics(self) -> Metrics:
        computed = sum(map(len, self._api.prompts))
        return parse_metrics(
            f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
            f'continuum:pins_ended_total{{cause="returned"}} {self._told}\n'
        )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(demo, "VllmServer", FakeVllm)
    monkeypatch.setattr(demo, "make_model", lambda: Path("model"))
    monkeypatch.setattr("bench.chat.plan.Agents.pause_limits_s", (0.0, 0.0))
    return


def test_the_demo_compares_two_servers_and_keeps_every_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo.json"
    options = ["--programs", "2", "--turns", "2", "--rate", "1000", "--json", str(out)]
    assert demo.main(options) == 0
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in capsys.readouterr().out.splitlines()
        if len(cells := line.strip("│").split("│")) == 4
    }
    assert rows["same outputs"] == ["-", "yes (4/4)", ""]
    assert rows["computed"][0] == rows["computed"][1] != "0"
    assert rows["computed"][2] == "1.00x"
    assert rows["pins, by how they ended"] == ["-", "returned 4", ""]
    told = json.loads(out.read_text())
    assert told["workload"]["programs"] == 2
    assert [arm["server_start_s"] for arm in told["arms"]] == [1.5, 1.5]
    for program in told["arms"][0]["programs"]:
        assert [turn["turn"] for turn in program["turns"]] == [0, 1]
        assert all(turn["text"] for turn in program["turns"])
