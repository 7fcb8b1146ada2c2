"""`continuum explain`: a small trace as text, and what happens when there is nothing to tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner, Result

from continuum_connector.programs.program import program_key
from continuum_connector.tools.cli import explain as command
from continuum_connector.tools.cli.app import app

KNOWN = {"ending": "calls", "tools": ["pytest -q"], "gap_p50": 2.5, "gap_p90": 9.0}
KNOWN |= {"gaps_seen": 12.0, "p_in_time": 0.83, "prefill": 1.5, "load": 0.25, "queueing": 0.0}
KNOWN |= {"eta": 1.0, "price": 0.001, "mean_blocks": 40.0, "waiting": 2}
VALUES = {"free": 0.0, "pin": 0.9, "offload": 0.7, "pin_store": 1.2}


def record(event: str, now: float, program: str = "job:p", **fields: Any) -> dict[str, Any]:
    return {"t": 1.7e9 + now, "now": now, "event": event, "program": program, **fields}


def small() -> list[dict[str, Any]]:
    """A program of two turns: pinned, back in time, done; with a reset in between."""
    pin = {"decision": "pin", "ttl_s": 4.0, "then": "store", "why": "worth it", "blocks": 50}
    hits = {"vram": 800, "dram": 0}
    kept = {"only_ours": 704, "stock_too": 96, "only_stock": 0}
    return [
        {"t": 1.7e9, "now": 5.0, "event": "start", "policy": "adaptive"},
        record("arrive", 10.0, turn=1, tokens=790, gap_s=None),
        record("admit", 10.25, turn=1, waited_s=0.25, tokens=790, hit_tokens={"vram": 96}),
        record("decision", 12.0, turn=1, tokens=801, values=VALUES, known=KNOWN, **pin),
        record("store", 12.1, blocks=50, outcome="done", seconds=0.1),
        {"t": 1.7e9, "now": 12.5, "event": "epoch", "cause": "reset"},
        record("arrive", 13.0, "job:other", turn=1, tokens=10),
        record("decision", 13.5, "job:other", turn=1, decision="free", why="x"),
        record("return", 14.0, turn=2, tokens=900, gap_s=2.0),
        record(
            *("admit", 14.003),
            turn=2,
            waited_s=0.003,
            tokens=900,
            hit_tokens=hits,
            against_stock=kept,
        ),
        record(
            "outcome",
            14.003,
            turn=1,
            decision="pin",
            outcome="in_time",
            kept_tokens=800,
            hit_tokens=hits,
            against_stock=kept,
            recomputed_tokens=0,
            saved_s=1.318,
            lost_s=0.0,
        ),
        record("pin_end", 14.003, cause="returned", held_s=2.003, blocks=50),
        record("decision", 15.5, turn=2, decision="free", why="last turn of its program"),
        record("outcome", 15.5, turn=2, decision="free", outcome="done"),
    ]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", small())


def run(*line: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, list(line), env={"COLUMNS": str(columns)})


GOLDEN = """\
job:p  2 turns in 5.5 s · of 1,690 prompt tokens 896 in VRAM · 1 in time · 1 done

0.00 s  turn 1  arrived: 790 tokens
0.25 s          ran after 0.25 s of waiting: 96 in VRAM, 694 to compute
2.00 s          ended with a call of pytest -q; pinned for 4 s, with a copy in DRAM: worth it
                worth to all programs: pin_store 1.2 s, pin 0.9 s, offload 0.7 s, free 0 s
                back in time with 83 %; half of such pauses are over after 2.5 s (12 seen); 1.5 s to
                compute, 0.25 s to load; 50 blocks cost the others 0.05 s per second; 2 waiting
                50 blocks stored in DRAM in 0.1 s
2.50 s          the prefix cache was reset: every pin ended, everything below VRAM is forgotten

4.00 s  turn 2  arrived: back after 2 s, 900 tokens, its pin waits for it
4.00 s          ran after 3 ms of waiting: 800 in VRAM, 100 to compute
                of these 704 only we kept, 96 stock vLLM would have kept too
4.00 s          turn 1's pin served: it was in time; 0 of its tokens were lost; about 1.32 s of
                prefill saved, 0 s repeated
4.00 s          pin ended after 2 s: returned
5.50 s          ended with 0 tokens; let go: last turn of its program
5.50 s          turn 2: nothing more is needed of it
"""


def test_a_life_is_told_turn_by_turn(trace: Path) -> None:
    result = run("explain", "p", "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.output.splitlines()] == GOLDEN.splitlines()
    assert "\x1b" not in result.output


def test_where_a_prompt_that_goes_on_differs_is_told(tmp_path: Path) -> None:
    at = {"in_a_row": 2, "from": 1024, "to": 1040, "of": 9000, "part": "tools"}
    records = [
        record("arrive", 10.0, turn=3, tokens=9000, diverged=at),
        record("decision", 12.0, turn=3, decision="free", why="x"),
    ]
    path = write(tmp_path / "trace.jsonl", records)
    told = " ".join(run("explain", "p", "--trace", str(path)).output.split())
    assert "differs within tokens 1,024..1,040 of 9,000 (tools), 2 times in a row" in told


def test_what_a_disk_brought_is_told_beside_the_other_tiers(tmp_path: Path) -> None:
    hits = {"vram": 100, "dram": 200, "disk": 500}
    records = [
        record("arrive", 10.0, turn=1, tokens=790),
        record("decision", 12.0, turn=1, tokens=800, decision="offload", why="worth it"),
        record("write", 12.5, blocks=32, outcome="done", seconds=0.25),
        record("arrive", 30.0, turn=2, tokens=900),
        record("read", 30.5, blocks=32, outcome="done", seconds=0.5),
        record("read", 30.6, blocks=16, outcome="failed", reasons=["corrupt"], seconds=0.6),
        record("admit", 31.0, turn=2, waited_s=1.0, tokens=900, hit_tokens=hits),
        record(
            *("outcome", 31.0),
            turn=1,
            decision="offload",
            outcome="in_disk",
            hit_tokens=hits,
            recomputed_tokens=20,
            gap_s=18.0,
        ),
    ]
    path = write(tmp_path / "trace.jsonl", records)
    said = " ".join(run("explain", "p", "--trace", str(path), columns=200).output.split())
    assert "of 900 prompt tokens 100 in VRAM, 200 in DRAM, 500 on disk" in said
    assert "32 blocks written to disk in 0.25 s" in said
    assert "32 blocks read from disk in 0.5 s" in said
    assert "16 blocks not read from disk: failed (corrupt)" in said
    assert "ran after 1 s of waiting: 100 in VRAM, 200 in DRAM, 500 on disk, 100 to compute" in said
    assert "turn 1 was on disk; 20 of its tokens were lost" in said
    every = run("explain", "--trace", str(path), columns=200).output
    assert "offload           in disk" in every


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(trace: Path, columns: int) -> None:
    result = run("explain", "job:p", "--trace", str(trace), columns=columns)
    assert max(map(len, result.output.splitlines())) <= columns
    assert result.output.split() == GOLDEN.split()


def test_who_is_not_there_is_answered_with_those_who_are(trace: Path) -> None:
    result = run("explain", "othr", "--trace", str(trace))
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "no program 'othr' is in the trace; those with most turns: job:p, job:other" in said


def test_an_id_that_several_namespaces_have_is_asked_for_in_full(tmp_path: Path) -> None:
    records = [*small(), record("arrive", 20.0, "session:p", turn=1, tokens=5)]
    path = write(tmp_path / "trace.jsonl", records)
    assert "any of job:p, session:p" in run("explain", "p", "--trace", str(path)).output
    assert run("explain", "session:p", "--trace", str(path)).exit_code == 0


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("client", ["run-17", "user@host: 7", "long " * 100, "anonymous:1"])
def test_the_id_a_client_sent_finds_its_program_whatever_became_of_it(
    tmp_path: Path, client: str, salt: str | None
) -> None:
    client = client.strip()
    for namespace in ("", "job:"):
        key = program_key(namespace + client, salt)
        records = [
            record("arrive", 1.0, each, turn=1, tokens=5)
            for each in (key, f"session:long~{32 * '0'}")
        ]
        path = write(tmp_path / "trace.jsonl", records)
        for typed in (client, namespace + client, key):
            result = run("explain", typed, "--trace", str(path), columns=300)
            assert result.output.startswith(f"{key}  "), result.output


def test_lines_that_are_no_records_are_skipped_and_counted(tmp_path: Path) -> None:
    good = [json.dumps(each) for each in small()]
    bad = ['{"event":"deci', "null", "[]", '{"event":"arrive"}', '{"now":1}', "\x00\xff", "NaN"]
    bad += ['{"event":"admit","now":1e999}', '{"event":5,"now":1}', "x" * 3_000_000]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([good[0], *bad, "", *good[1:], good[2][:30]]))
    result = run("explain", "p", "--trace", str(path))
    assert result.exit_code == 0, result.output
    assert f"{len(bad) + 1} lines of the trace are no records" in result.output
    assert result.output.splitlines()[2:6] == run_lines(tmp_path)[2:6]


def run_lines(folder: Path) -> list[str]:
    path = write(folder / "good.jsonl", small())
    return run("explain", "p", "--trace", str(path)).output.splitlines()


def test_fields_of_other_types_than_ours_are_told_as_if_they_were_missing(tmp_path: Path) -> None:
    odd: list[Any] = [None, "x", True, -1, [], {}, [1], {"vram": "x"}, 1e300]
    records = [
        {**each, **{key: value for key in each if key not in ("event", "now", "program")}}
        for value in odd
        for each in small()
    ]
    path = write(tmp_path / "trace.jsonl", records)
    result = run("explain", "p", "--trace", str(path))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty"), ("hello\n", "is no trace of"), ("{}", "is no trace of")],
)
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    result = run("explain", "p", "--trace", str(path))
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
    missing = run("explain", "p", "--trace", str(tmp_path / "none"))
    assert "cannot be read (No such file or directory)" in " ".join(missing.output.split())


def test_without_a_program_every_decision_is_a_line_with_what_came_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", small())
    result = run("explain", "--trace", str(path), columns=200)
    assert result.exit_code == 0
    head, *told = [" ".join(each.split()) for each in result.output.splitlines()]
    assert head == "time program turn tokens decided outcome saved"
    assert told == [
        "0.00s job:p 1 801 pin 4 s, copy in time 1.32 s",
        "1.50s job:other 1 0 free (open)",
        "3.50s job:p 2 0 free done",
    ]


def test_a_trace_in_which_nothing_was_decided_says_so(tmp_path: Path) -> None:
    result = run("explain", "--trace", str(write(tmp_path / "trace.jsonl", small()[:3])))
    assert result.exit_code == 1
    assert "no turn has ended in this trace" in result.output


def test_the_log_waits_for_no_outcome_of_a_server_that_has_ended() -> None:
    turns = [record("decision", 1.0 + n, turn=n, decision="free") for n in range(1, 6)]
    late = record("outcome", 9.0, turn=5, decision="free", outcome="never")
    told = command.decisions([*turns[:4], {"event": "start", "now": 5.5}, turns[4], late])
    assert [next(told)[0]["turn"] for _ in range(4)] == [1, 2, 3, 4]
    assert [bool(outcome) for _, outcome in told] == [True]


LONG = "codex:0199f0c2-7d1e-7c51-9a30-5ce1b2f47f3e"


def busy(program: str = LONG) -> list[dict[str, Any]]:
    """A turn whose line has every column, and the widest that a cell gets."""
    pin = {"decision": "pin", "ttl_s": 0.905, "then": "store", "values": {"pin": 1.234, "free": 1}}
    hits = {"vram": 123_456, "dram": 7_890}
    told = {"turn": 4321, "decision": "pin", "outcome": "switched_off", "hit_tokens": hits}
    told |= {"recomputed_tokens": 55, "saved_s": -0.264, "gap_s": 0.573}
    return [
        record("arrive", 5.0, program, turn=4321, tokens=790, source="vendor"),
        record("decision", 9_876.54, program, turn=4321, tokens=131_072, **pin),
        record("outcome", 9_999.0, program, **told),
        record("decision", 19_876.54, program, turn=4322, tokens=131_072, decision="offload"),
    ]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 120, 140, 164, 165, 200])
def test_no_line_of_the_list_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    path = write(tmp_path / "trace.jsonl", [*small(), *busy()])
    lines = run("explain", "--trace", str(path), columns=columns).output.splitlines()
    assert max(map(len, lines)) <= columns


def test_80_columns_have_what_was_decided_and_what_came_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [*small(), *busy()])
    output = run("explain", "--trace", str(path), columns=80).output
    told = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    assert (
        told
        == """\
     time program          turn   tokens decided           outcome      saved
    0.00s job:p               1      801 pin 4 s, copy     in time      1.32 s
    1.50s job:other           1        0 free              (open)
    3.50s job:p               2        0 free              done
9,864.54s codex:01…2f47f3e 4321  131,072 pin 0.905 s, copy switched off -0.264 s
   19865s codex:01…2f47f3e 4322  131,072 offload           (open)
"""
    )


def test_a_pipe_and_a_wide_terminal_show_whole_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "trace.jsonl", [*small(), *busy()])
    wide = run("explain", "--trace", str(path), columns=165).output
    assert LONG in wide
    monkeypatch.delenv("COLUMNS", raising=False)
    assert CliRunner().invoke(app, ["explain", "--trace", str(path)]).output == wide


def test_a_shortened_name_keeps_its_beginning_and_end_and_is_understood(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [*small(), *busy()])
    for room in (16, 24):
        name = command.short(LONG, room)
        assert len(name) == room
        assert name.startswith("codex:01")
        assert run("explain", name, "--trace", str(path)).output.startswith(LONG)
    assert command.short("x" * 20, 16) == "x" * 8 + "…" + "x" * 7
    assert len(command.short(f"{'n' * 40}:id", 16)) == 16


@pytest.mark.parametrize("typed", ["codex", "0199f0c2", "codex:0199", "job:ot", "othe"])
def test_the_beginning_of_a_name_or_an_id_is_enough(tmp_path: Path, typed: str) -> None:
    path = write(tmp_path / "trace.jsonl", [*small(), *busy()])
    result = run("explain", typed, "--trace", str(path))
    assert result.exit_code == 0, result.output
    assert result.output.startswith((LONG, "job:other"))


def test_a_beginning_that_several_have_is_answered_with_them(tmp_path: Path) -> None:
    more = [busy(f"codex:{n}") for n in range(7)]
    path = write(tmp_path / "trace.jsonl", [*small(), *busy(), *(r for each in more for r in each)])
    result = run("explain", "codex", "--trace", str(path), columns=200)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert f"'codex' may be any of {LONG}, codex:0, codex:1, codex:2, codex:3 and 3 more" in said
    assert said.endswith("give more of the name")


def test_a_whole_name_wins_over_a_longer_one_that_begins_with_it(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [*small(), *busy("job:p2"), *busy("salted:1f:job:p")])
    assert run("explain", "job:p", "--trace", str(path)).output.startswith("job:p  ")
    path = write(tmp_path / "trace.jsonl", [*small(), *busy("job:p2")])
    assert run("explain", "p", "--trace", str(path)).output.startswith("job:p  ")


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["session_id", "session_id"], "named by session_id"),
        (["lineage", "job_id"], "named by lineage, job_id"),
        ([], "0 turns in"),
    ],
)
def test_a_life_begins_with_where_the_id_came_from(
    tmp_path: Path, sources: list[str], said: str
) -> None:
    turns = [record("arrive", float(n), turn=n, source=each) for n, each in enumerate(sources, 1)]
    path = write(tmp_path / "trace.jsonl", turns or [record("arrive", 1.0, turn=1)])
    first = run("explain", "job:p", "--trace", str(path), columns=200).output.splitlines()[0]
    assert first.startswith(f"job:p  {said}")
