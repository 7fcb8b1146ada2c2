"""serve_equal: how its servers are started. The servers themselves need a GPU, or minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.server import ServerOptions
from tests.gpu import serve_equal


@pytest.mark.parametrize(("given", "is_eager"), [([], True), (["--graphs"], False)])
def test_servers_are_eager_unless_graphs_are_asked_for(given: list[str], is_eager: bool) -> None:
    options = serve_equal.parse([*given, "--", "--load-format", "dummy"])
    command = ServerOptions(**serve_equal.fields(options)).command(Path("model"), 1)
    assert ("--enforce-eager" in command) is is_eager
    assert command[-2:] == ["--load-format", "dummy"]


def test_no_verdict_where_nothing_was_captured_though_graphs_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    monkeypatch.setattr(serve_equal, "VllmServer", lambda *_, **__: FakeServer(log))
    monkeypatch.setattr(serve_equal, "play", lambda *_, **__: [[[1, 2]]])
    monkeypatch.setattr(serve_equal, "ask_ours", lambda *_: ([[[1, 2]]], 5.0, 0.0))
    arguments = ["--model", str(tmp_path), "--graphs"]
    log.write_text("started")
    assert serve_equal.main(arguments) == 2
    assert capsys.readouterr().out.startswith("NO VERDICT: --graphs")
    log.write_text("INFO Graph capturing finished in 3 secs, took 0.20 GiB")
    assert serve_equal.main(arguments) == 0


class FakeServer:
    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        return
