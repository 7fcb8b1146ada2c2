"""The A/B runner on real servers: both arms answer alike, and ours computes less."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bench.common.plans import Added
from bench.serve import compare, results
from bench.serve.ab import Experiment, run_all
from bench.serve.arms import find_arm
from bench.serve.programs import Defaults, Uniform
from bench.serve.server import ServerOptions
from bench.serve.summary import summarize

TURNS = (Added(200, 4), Added(60, 4))
SMALL = Uniform("small", "p", TURNS, 0, Defaults("turns", programs=4))


def test_two_arms_run_one_after_the_other_and_agree(tiny_model: Path, tmp_path: Path) -> None:
    experiment = Experiment(
        arms=(find_arm("none"), find_arm("continuum:lru_offload")),
        workload=SMALL,
        model=tiny_model,
        pressures=(0.5,),
        server=ServerOptions(num_blocks=10, block_size=32),  # room for one context
    )
    assert run_all({tmp_path: experiment}) == "done"
    base, ours = compare.columns(results.load(tmp_path))
    assert str(compare.sameness(base, ours)) == "yes (8/8)"
    stock, with_dram = (summarize(column.runs[0]) for column in (base, ours))
    assert stock["saved_tokens"] == 0  # nothing survives between turns
    assert with_dram["hit_dram_tokens"] >= 4 * 192
    assert with_dram["computed_tokens"] < stock["computed_tokens"]
    for run in (base.runs[0], ours.runs[0]):
        assert "Application startup complete" in (run.folder / results.LOG).read_text()
        port = run.run.url.rpartition(":")[2]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5.0)
