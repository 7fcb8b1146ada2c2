"""`continuum calibrate` on a real server, and the server's own figures beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuum_connector.costs.costs import Costs
from tests.server.conftest import ServerFactory

pytest.importorskip("typer")
CHUNK = 1024


def test_outside_and_inside_agree_on_what_a_prefill_costs(
    server_factory: ServerFactory, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from continuum_connector.tools.cli.app import app

    server = server_factory("calibrate", num_blocks=300, connector={"dram_bytes": "64MiB"})
    line = ["calibrate", server.url, "--lengths", "250,500,1000,2000,4000", "--out", str(tmp_path)]
    line += ["--chunk", str(CHUNK), "--repeats", "3"]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "120"})
    print(result.output)
    assert result.exit_code == 0, result.output
    content = json.loads(next(tmp_path.iterdir()).read_text())
    assert [point["num_cached"] for point in content["measured"]] == [0] * 5 + [
        250,
        750,
        1750,
        3750,
    ]
    assert all(len(point["prefill_s"]) == 3 for point in content["measured"])

    costs = Costs(CHUNK)
    assert costs.restore(content["state"]["costs"]) == 0
    outside = costs.prefill_s(1000) / 1000
    inside = server.metric("continuum:prefill_seconds_per_token", cached_tokens="0")
    assert server.metric("continuum:costs_known", cost="prefill") == 1
    # Loosely: other work on the machine's cores slows single steps to a multiple.
    assert 0.5 * outside < inside < 2.0 * outside
