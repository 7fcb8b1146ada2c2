"""Results that an earlier version wrote are read as ever. old_results/ is never written anew."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.common.workloads import Request, lines
from bench.serve import compare, results
from bench.serve.summary import summarize
from bench.sim import store
from bench.sim.command import grids
from bench.sim.workloads import trace_files

OLD = Path(__file__).with_name("old_results")
TRACES = sorted(trace_files.COMMITTED.glob("*.gz"))


def test_a_file_of_the_lab() -> None:
    found = store.results(OLD / "lab.jsonl")
    assert [start.versions for start in store.starts(OLD / "lab.jsonl")] == [{"vllm": "0.32.0"}]
    assert list(found) == KEYS.split()  # else a run that was stopped would begin anew
    assert [each.error for each in found.values() if each.error] == ["StuckError: nothing ends"]
    console = Console(width=200, file=io.StringIO())
    for shown in grids(console, list(found.values())):
        console.print(shown)
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert rows[0].startswith("L40S, 10 GB DRAM, agents, programs 3, turns 2, context 2000, 2 prog")
    assert rows[4:-1] == LAB


KEYS = "358f646da19bb005 098c222373dcf49f a8db73303c736ef5 4932f22a393165ae 023234f71bd5f00e"
LAB = [
    "stock (2) 1.79 s 2.04 s 0.0854 s 0.179 s 0.0938 s 4,300 4,032 0 0 GB 0 GB 77.5 %",
    "adaptive (2) 1.79 s 2.04 s 0.0854 s 0.179 s 0.0938 s 4,300 4,032 0 0.218 GB 0 GB 77.5 %",
    "1.00x 1.00x 1.00x 1.00x 1.00x",
]


def test_a_folder_of_real_servers() -> None:
    runs = results.load(OLD / "ab")
    assert [(run.run.arm, run.run.state) for run in runs] == [
        ("none", "done"),
        ("continuum:adaptive", "done"),
        ("simple", "cannot_run"),
    ]
    base, ours = compare.columns(runs, "none")
    wanted = {"jct_mean_s": 9.0, "ttft_p95_s": 2.5, "computed_tokens": 15_000, "retries": 0}
    assert {key: summarize(base.runs[0])[key] for key in wanted} == wanted
    assert str(compare.ratio(base, ours, compare.COMPARED[0])) == "0.50x"
    assert str(compare.sameness(base, ours)) == "yes (15/15)"
    assert [len(run.samples) for run in runs] == [5, 5, 0]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_trace_that_is_kept_here_is_read_to_its_last_line(path: Path) -> None:
    kind = Request if path.name.startswith("claude") else dict
    with gzip.open(path) as file:
        last = msgspec.json.decode(file.read().splitlines()[-1])
    assert msgspec.to_builtins(list(lines(path, kind))[-1]).items() >= last.items()
