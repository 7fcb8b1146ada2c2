"""The engine's steps in the trace of a real server (trace_steps_s), as `analyze` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import DRAM_BYTES, NUM_BLOCKS, ServerFactory
from tests.server.helpers import ask, dialogs, last, play_at_once, read_trace, reset, terminate


def test_blocks_fall_and_recover_turns_run_and_hooks_take_time(
    server_factory: ServerFactory, tmp_path: Path
) -> None:
    pytest.importorskip("typer")
    from continuum_connector.tools.analysis.source import Source
    from continuum_connector.tools.cli import analyze

    path = tmp_path / "trace.jsonl"
    connector = {"policy": "fixed_ttl", "ttl_s": 50, "dram_bytes": DRAM_BYTES}
    connector |= {"trace_path": str(path), "trace_steps_s": 0.001}
    time_to_end = ("--shutdown-timeout", "60")  # or the last lines may be lost
    server = server_factory("steps", num_blocks=NUM_BLOCKS, connector=connector, args=time_to_end)
    play_at_once(server, dialogs(4, rounds=3, first=400, tool=100))
    reset(server)
    ask(server, "completions", ["the end"], 2, job_id="last", **last())
    terminate(server)
    records = read_trace(path)
    steps = [each for each in records if each["event"] == "steps"]
    assert [each["now"] for each in steps] == sorted(each["now"] for each in steps)
    free = [each["free_blocks"] for each in steps]
    usable = NUM_BLOCKS - 1  # the null block holds nothing
    assert all(0 <= n <= usable for n in free)
    assert min(free) < usable - 4 * 400 // 32, "four prompts at once"
    assert max(free[free.index(min(free)) :]) > usable - 4, "only the last turn's are taken"
    assert max(each["running"] for each in steps) > 1
    assert max(each["pinned_blocks"] for each in steps) > 12
    assert max(each["store_blocks"] for each in steps) > 0
    assert all(0.0 <= each["hook_max_s"] <= each["hook_s"] for each in steps)
    assert 0.0 < max(each["hook_s"] for each in steps) < 1.0
    num_turns = sum(each["event"] == "decision" for each in records)
    assert sum(each["steps"] for each in steps) >= num_turns == 4 * 3 + 1
    summary = analyze.summarize(Source(path))
    for name in ("now", "free_blocks", "hook_max_s"):
        assert [*summary.steps[name]] == [each[name] for each in steps]
