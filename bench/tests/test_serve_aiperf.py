"""aiperf as a client: what it is asked to do, and what is made of its records. A script stands
for aiperf here; it writes what aiperf 0.13 writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.common.plans import Added, ProgramPlan, Streams, Talk, grown
from bench.serve.aiperf import Aiperf, blocks, trace
from bench.serve.api import Api, ApiError, Patience
from bench.serve.arrivals import Arrivals
from bench.serve.load import ClientError, Load
from bench.serve.programs import Defaults, Uniform
from bench.serve.record import RunFolder
from bench.serve.results import Loaded, Run, load_run
from bench.serve.summary import BY_KEY
from bench.serve.token_ids import Tokens

SMALL = Uniform("small", "p", (Added(70, 4), Added(40, 4, 1.0)), 0, Defaults("closed:2"))
LOAD = Load(SMALL, Arrivals("closed:2", at_once=2), Tokens(42), "tiny", programs=2)
S = 1_000_000_000


def record(program: str, turn: int, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    """One line of profile_export.jsonl."""
    numbers = {"usage_prompt_tokens": 100, "usage_prompt_cache_read_tokens": 32 * turn}
    numbers |= {"usage_completion_tokens": 4, "time_to_first_token": 250.0}
    meta = {"conversation_id": program, "x_correlation_id": f"x-{program}", "turn_index": turn}
    meta |= {"request_start_ns": int(start_s * S), "request_end_ns": int(end_s * S)}
    meta["benchmark_phase"] = more.pop("phase", "profiling")
    metrics = {name: {"value": value, "unit": ""} for name, value in numbers.items()}
    return {"metadata": meta, "metrics": metrics, **more}


GOOD = [
    record("p0000", 0, 10.0, 11.0),
    record("p0001", 0, 10.5, 11.5),
    record("p0000", 1, 12.0, 14.0),
    record("p0001", 1, 13.0, 15.0),
]
SUMMARY = {"theoretical_prefix_cache_hit": {"avg": 20.0}, "total_token_throughput": {"avg": 83.2}}
FAKE = """#!/usr/bin/env python3
import json, pathlib, sys
here = pathlib.Path(__file__).parent
out = pathlib.Path(sys.argv[sys.argv.index("--artifact-dir") + 1])
(here / "argv.json").write_text(json.dumps(sys.argv))
if (here / "fails").exists():
    print("10:00 ERROR    Failed to load tokenizer")
    sys.exit(1)
out.mkdir()
(out / "profile_export.jsonl").write_bytes((here / "records").read_bytes())
(out / "profile_export_aiperf.json").write_bytes((here / "summary").read_bytes())
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where an aiperf is installed that writes GOOD."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "lib/python3.12/site-packages/aiperf-0.13.0.dist-info").mkdir(parents=True)
    (home / "bin/aiperf").write_text(FAKE)
    (home / "bin/aiperf").chmod(0o755)
    (home / "bin/summary").write_text(json.dumps(SUMMARY))
    write(home, GOOD)
    return home


def write(home: Path, records: list[dict[str, Any]]) -> None:
    (home / "bin/records").write_text("".join(json.dumps(each) + "\n" for each in records))


def played(home: Path) -> Loaded:
    """What is in the folder of a run that this aiperf made."""
    folder = home / "run"
    api = Api("http://127.0.0.1:9", patience=Patience(5))
    with RunFolder(folder, Run(name="run")) as out:
        asyncio.run(Aiperf.installed(home / "model", 32, home).drive(api, LOAD, out))
        out.close("done")
    return load_run(folder)


def test_records_become_turns_as_the_client_saw_them(home: Path) -> None:
    turns = played(home).turns
    assert [(t.program, t.turn, t.start_s, t.latency_s) for t in turns] == [
        ("p0000", 0, 0.0, 1.0),
        ("p0001", 0, 0.5, 1.0),
        ("p0000", 1, 2.0, 2.0),
        ("p0001", 1, 3.0, 2.0),
    ]
    assert {(t.ttft_s, t.prompt_tokens, t.answer_tokens) for t in turns} == {(0.25, 100, 4)}
    assert [t.cached_tokens for t in turns] == [0, 0, 32, 32]


def test_a_program_lasts_from_its_first_request_to_its_last_answer(home: Path) -> None:
    """And aiperf's own theoretical share stands beside what was cached."""
    found = played(home)
    told = [(p.program, p.jct_s, p.tool_s, p.turns) for p in found.programs]
    assert told == [("p0000", 4.0, 1.0, 2), ("p0001", 4.5, 1.5, 2)]
    assert found.run.wall_s == 5.0
    shares = [BY_KEY[key].value(found) for key in ("cached_pct", "theory_pct", "found_pct")]
    assert shares == [16.0, 20.0, 80.0]


def test_a_request_that_failed_ends_its_program_with_the_reason(home: Path) -> None:
    broken = record("p0001", 0, 10.5, 11.5, error={"code": 400, "message": "too long"})
    write(home, [GOOD[0], broken, GOOD[2]])
    found = played(home)
    assert {(p.program, p.error, p.turns) for p in found.programs} == {
        ("p0000", "", 2),
        ("p0001", "400 too long", 0),
    }


def test_a_program_that_was_cut_short_is_in_no_jct_and_a_warm_up_in_nothing(home: Path) -> None:
    write(home, [record("p0000", 0, 1.0, 9.0, phase="warmup"), *GOOD[:3]])
    found = played(home)
    assert [program.program for program in found.programs] == ["p0000"]
    assert len(found.turns) == 3


def test_every_program_is_played_once_as_many_at_a_time_as_was_said(home: Path) -> None:
    played(home)
    line = json.loads((home / "bin/argv.json").read_text())
    for option, value in {"--concurrency": "2", "--num-conversations": "2"}.items():
        assert line[line.index(option) + 1] == value
    assert len(list((home / "run/traces").glob("*.json"))) == 2


def test_an_aiperf_that_fails_is_told_with_its_own_words(home: Path) -> None:
    (home / "bin/fails").touch()
    with pytest.raises(ApiError, match="status 1: 10:00 ERROR    Failed to load tokenizer"):
        played(home)


def test_without_aiperf_one_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"install it with: python -m bench\.serve\.aiperf"):
        Aiperf.installed(tmp_path, 32, tmp_path)


# --- the traces that it plays ----------------------------------------------------------------
GROWING = grown("p", [Added(70, 10), Added(40, 5, 1.5), Added(30, 5, 2.0)])


def test_each_turn_keeps_its_lengths_and_comes_its_pause_after_the_one_before() -> None:
    found = trace(GROWING, 32)
    told = [(each["t"], each["in"], each["out"], each["think_time"]) for each in found["requests"]]
    assert told == [(0.0, 70, 10, 0.0), (1.5, 120, 5, 1.5), (3.5, 155, 5, 2.0)]
    assert (found["id"], found["block_size"], found["hash_id_scope"]) == ("p", 32, "local")


def test_a_prompt_is_its_whole_blocks_and_begins_as_the_one_before() -> None:
    ids = [each["hash_ids"] for each in trace(GROWING, 32)["requests"]]
    assert ids == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    whole = list(blocks(GROWING.turns[-1].prompt, 32))
    assert [sum(span.length for span in block) for block in whole] == [32] * 4


def test_what_was_said_before_a_cut_is_common_and_what_comes_after_it_is_new() -> None:
    talk = Talk(Streams())
    talk.turn(100, 10)
    talk.forget(40)
    talk.turn(60, 10)
    first, second = trace(ProgramPlan("p", talk.turns()), 32)["requests"]
    assert first["hash_ids"] == [0, 1, 2]
    assert second["hash_ids"] == [0, 3, 4]  # the second block is cut within
