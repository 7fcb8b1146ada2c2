"""The load generator against a real server: what it counts is what the server counts."""

from __future__ import annotations

from pathlib import Path

from bench.common.plans import Added
from bench.serve import results
from bench.serve.arrivals import read_arrivals
from bench.serve.load import Load
from bench.serve.programs import Defaults, Uniform
from bench.serve.record import RunFolder
from bench.serve.results import Run
from bench.serve.server import SERVED_NAME
from bench.serve.session import Manner, measure
from bench.serve.summary import summarize
from bench.serve.token_ids import Tokens
from tests.server.conftest import ServerFactory

TURNS = (Added(100, 6), Added(64, 6, 0.05), Added(64, 6, 0.05))


def test_agents_measure_what_the_server_counts(
    server_factory: ServerFactory, tmp_path: Path
) -> None:
    server = server_factory("bench", num_blocks=200, connector={"dram_bytes": "16MiB"})
    workload = Uniform("small", "p", TURNS, 32, Defaults("closed:3"))
    arrivals = read_arrivals("closed:3", 1, 60.0, 4)
    load = Load(workload, arrivals, Tokens(1), SERVED_NAME, duration_s=60.0, programs=4)
    with RunFolder(tmp_path, Run(name="r")) as folder:
        assert measure(server.url, load, folder, Manner(reset=True)) == "done"
    run = results.load_run(tmp_path)
    figures = summarize(run)
    assert [sorted(t.turn for t in run.turns), len(run.finished)] == [
        [0] * 4 + [1] * 4 + [2] * 4,
        4,
    ]
    assert {len(turn.answer) for turn in run.turns} == {6}
    assert figures["prompt_tokens"] == 4 * (100 + 170 + 240)
    # All but the shared block and the last one of each prompt; then one step of one token.
    assert figures["cached_tokens"] >= 4 * (96 + 160)
    assert figures["saved_tokens"] == figures["cached_tokens"]
    assert figures["computed_tokens"] == figures["prompt_tokens"] - figures["cached_tokens"] + 1
    assert all(turn.ttft_s > 0 and turn.tpot_s > 0 for turn in run.turns)
