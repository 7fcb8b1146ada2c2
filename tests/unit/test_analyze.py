"""`continuum analyze` and `convert`: numbers computed by hand, and a format of others."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from continuum_connector.errors import ToldError
from continuum_connector.observe.trace import EVENTS
from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import spread
from continuum_connector.tools.cli.convert import KEYS, write_original
from tests.narrow import last_words
from tests.unit.test_explain import record, run, small, write

KNOWN = {"prefill": 1.0, "price": 0.01, "load": 1.5, "waiting": 1}
PIN = {"decision": "pin", "ttl_s": 4.0, "then": "drop", "blocks": 10, "known": KNOWN}


def admit(now: float, program: str, turn: int, waited: float, tokens: int, *hits: int) -> Any:
    vram, dram = hits or (0, 0)
    found = {"vram": vram, "dram": dram}
    fields = {"turn": turn, "waited_s": waited, "tokens": tokens, "hit_tokens": found}
    if hits:  # of what was in VRAM stock would have kept half, and ten tokens more
        kept = {"only_ours": vram // 2 + dram, "stock_too": vram - vram // 2, "only_stock": 10}
        fields["against_stock"] = kept
    return record("admit", now, program, **fields)


def outcome(now: float, program: str, turn: int, what: str) -> Any:
    decision, result = what.split()
    return record("outcome", now, program, turn=turn, decision=decision, outcome=result)


def by_hand() -> list[dict[str, Any]]:
    """A: a pin in time, a pin for nobody. B: freed and lost, offloaded and found, done."""
    let_go = {"blocks": 10, "known": KNOWN}
    return [
        {"t": 1e9, "now": 0.0, "event": "start", "policy": "adaptive", "block_bytes": 1000},
        record("arrive", 0.0, "A", turn=1),
        admit(1.0, "A", 1, 1.0, 100),
        record("arrive", 2.0, "B", turn=1),
        admit(2.0, "B", 1, 0.0, 200),
        record("decision", 5.0, "A", turn=1, tokens=120, **PIN),
        record("decision", 6.0, "B", turn=1, tokens=220, decision="free", **let_go),
        record("return", 7.0, "A", turn=2),
        admit(7.5, "A", 2, 0.5, 150, 100, 20),
        outcome(7.5, "A", 1, "pin in_time"),
        record("pin_end", 7.5, "A", cause="returned", held_s=2.5, blocks=10),
        record("decision", 9.0, "A", turn=2, tokens=160, **PIN),
        record("pin_end", 13.0, "A", cause="expired", held_s=4.0, blocks=10),
        record("arrive", 16.0, "B", turn=2),
        admit(17.0, "B", 2, 1.0, 300),
        outcome(17.0, "B", 1, "free recomputed"),
        record("decision", 20.0, "B", turn=2, tokens=310, decision="offload", **let_go),
        record("store", 20.5, "B", blocks=8, outcome="done"),
        record("arrive", 23.0, "B", turn=3),
        admit(23.0, "B", 3, 0.0, 400, 0, 300),
        outcome(23.0, "B", 2, "offload in_dram"),
        record("load", 23.1, "B", blocks=6, outcome="done"),
        record("load", 23.2, "B", blocks=3, outcome="failed"),
        record("decision", 25.0, "B", turn=3, tokens=410, decision="free", **let_go),
        outcome(25.0, "B", 3, "free done"),
        record("arrive", 25.0, "anonymous:1", turn=1),
        record("decision", 25.0, "anonymous:1", turn=1, decision="free"),
        outcome(909.0, "A", 2, "pin never"),
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", by_hand())


def numbers(path: Path) -> dict[str, Any]:
    result = run("analyze", str(path), "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    return found  # type: ignore[no-any-return]


def test_every_number_of_a_small_trace_is_the_one_computed_by_hand(trace: Path) -> None:
    found = numbers(trace)
    assert found["file"] == "trace.jsonl"
    assert found["JCT"] == pytest.approx(
        # A: 9 - 0, B: 25 - 2
        {"mean": 16, "p50": 16, "p90": 21.6, "p95": 22.3, "p99": 22.86, "min": 9, "max": 23}
    )
    assert found["turn"]["mean"] == pytest.approx((5 + 2 + 4 + 4 + 2 + 0) / 6)
    assert found["queueing"]["mean"] == pytest.approx((1 + 0.5 + 0 + 1 + 0) / 5)
    kept = {"only we kept": 370, "stock would have kept too": 50, "only stock would have kept": 20}
    assert found["all prompts"] == pytest.approx(
        {"tokens": 1150, "hit ratio, VRAM": 100 / 1150, "hit ratio, DRAM": 320 / 1150}
        | {name: num / 1150 for name, num in kept.items()}
    )
    assert found["returning turns"] == pytest.approx(
        {"tokens": 850, "hit ratio, VRAM": 100 / 850, "hit ratio, DRAM": 320 / 850}
        | {name: num / 850 for name, num in kept.items()}
        | {"save ratio": (120 + 0 + 300) / (120 + 220 + 310)}
    )
    assert found["decisions"] == {"pin": 2, "offload": 1, "free": 3}
    assert found["pins ended"] == {"expired": 1, "returned": 1, "held, mean": 3.25}
    assert found["DRAM"] == pytest.approx(
        {"blocks stored": 8, "blocks loaded": 6, "read back": 0.75, "transfers not done": 1}
        | {"bytes out": 8000, "bytes in": 6000}
    )


def test_a_disk_has_its_numbers_where_there_is_one(tmp_path: Path) -> None:
    hits = {"vram": 100, "dram": 20, "disk": 180}
    of_disk = [
        record("write", 20.6, "B", blocks=8, outcome="done"),
        record("read", 22.0, "B", blocks=4, outcome="done"),
        record("read", 22.0, "B", blocks=4, outcome="cancelled"),
        record("admit", 26.0, "B", turn=3, waited_s=0.0, tokens=600, hit_tokens=hits),
    ]
    found = numbers(write(tmp_path / "with.jsonl", [*by_hand(), *of_disk]))
    assert found["disk"] == pytest.approx(
        {"blocks written": 8, "blocks read": 4, "read back": 0.5, "transfers not done": 1}
        | {"bytes out": 8000, "bytes in": 4000}
    )
    assert found["DRAM"]["transfers not done"] == 1
    assert found["all prompts"]["hit ratio, disk"] == pytest.approx(180 / 1750)
    # B had 410 tokens before the last admit, of which 300 were found somewhere.
    assert found["returning turns"]["save ratio"] == pytest.approx(720 / 1060)
    without = numbers(write(tmp_path / "without.jsonl", by_hand()))
    assert "disk" not in without
    assert "hit ratio, disk" not in without["all prompts"]


def test_two_traces_are_two_columns(trace: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", small())
    result = run("analyze", str(trace), str(other))
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines()]
    assert ["trace", "policy", "adaptive", "adaptive"] in lines
    assert ["", "programs", "2", "2"] in lines
    assert ["JCT", "mean", "16 s", "3 s"] in lines
    assert ["", "save ratio", "64.6 %", "99.9 %"] in lines
    assert "\x1b" not in result.output


def test_traces_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(str(write(tmp_path / name / "trace.jsonl", small())))
    found = json.loads(run("analyze", *paths, "--json").output)
    assert [each["file"] for each in found] == ["a/trace.jsonl", "b/trace.jsonl"]


def test_a_restart_ends_what_was_under_way(tmp_path: Path) -> None:
    records = [*small(), *small()]  # the same clock again, as after a reboot
    found = numbers(write(tmp_path / "trace.jsonl", records))
    assert found["trace"]["programs"] == 4
    assert found["JCT"]["max"] == 5.5


@pytest.mark.parametrize("value", [None, "x", True, -1, [], {}, [1], 1e300])
def test_odd_fields_and_half_a_trace_raise_nothing(tmp_path: Path, value: Any) -> None:
    kept = ("event", "now", "program")
    odd = [{k: v if k in kept else value for k, v in each.items()} for each in by_hand()]
    nested = [{**each, "known": dict.fromkeys(KNOWN, value)} for each in by_hand()]
    for records in (odd, nested, by_hand()[9:], by_hand()[::-1]):
        path = write(tmp_path / "trace.jsonl", records)
        assert run("analyze", str(path)).exit_code == 0
        assert run("convert", str(path), "--out", str(tmp_path / "out"), "--force").exit_code == 0


def test_names_are_shown_as_they_are(trace: Path) -> None:
    odd = trace.with_name("[bold]:x:.jsonl")
    odd.write_text(trace.read_text())
    assert "[bold]:x:.jsonl" in run("analyze", str(odd)).output


# --- sums and percentiles ---------------------------------------------------------------------
def test_percentiles_are_interpolated() -> None:
    assert spread([]) == dict.fromkeys(["mean", "p50", "p90", "p95", "p99"])
    found = spread(range(999, -1, -1))
    assert (found["mean"], found["p50"], found["p90"]) == (499.5, 499.5, pytest.approx(899.1))
    assert {*spread([7.0]).values()} == {7.0}


# --- the original recorder's format --------------------------------------------------------------
ORIGINAL: dict[str, list[dict[str, float]]] = {
    "job_1": [
        {"Request_arrival_time": 1000.0},
        {"waiting_to_running": 1000.5, "prompt_length": 4096, "hit_length": 3800},
        {"Request_evicted_from_running_queue_time": 1001.0},
        {"evicted_to_running": 1002.0, "prompt_length": 4096, "hit_length": 4000},
        {"Request_departure_time": 1007.0},
        {"pinned_time": 1007.0},
        {"Request_arrival_time": 1008.0},
        {"waiting_to_running": 1008.25, "prompt_length": 4352, "hit_length": 4096},
        {"unpinned_time": 1008.5},
        {"Request_departure_time": 1010.0},
    ],
    "job_2": [
        {"Request_arrival_time": 1001.0},
        {"waiting_to_running": 1001.0, "prompt_length": 100, "hit_length": 0},
        {"Request_departure_time": 1002.0},
    ],
}


def test_each_event_of_the_original_format_is_one_of_ours() -> None:
    assert set(KEYS) <= set(EVENTS)
    assert len({*KEYS.values()}) == 6


def asked(event: str, at: float, tokens: int, hit: int, wait: float = 0.0) -> dict[str, Any]:
    fields = {"tokens": tokens, "hit_tokens": {"vram": hit - 96, "dram": 96}, "waited_s": wait}
    return record(event, at, "job_1", **fields)


def test_a_trace_is_written_as_the_original_recorder_would_have(tmp_path: Path) -> None:
    records = [
        record("arrive", 0.0, "job_1"),
        asked("admit", 0.5, 4096, 3800, 0.5),
        record("preempt", 1.0, "job_1"),
        asked("readmit", 2.0, 4096, 4000),
        record("store", 2.5, "job_1", outcome="done"),
        record("decision", 7.0, "job_1", decision="pin"),
        record("return", 8.0, "job_1"),
        asked("admit", 8.25, 4352, 4096, 0.25),
        record("pin_end", 8.5, "job_1"),
        record("decision", 10.0, "job_1", decision="free"),
        record("arrive", 1.0, "job_2"),
        record("admit", 1.0, "job_2", tokens=100, hit_tokens={"vram": 0}),
        record("decision", 2.0, "job_2", decision="offload"),
    ]
    records = [{**each, "t": 1000.0 + each["now"]} for each in records]
    path, out = write(tmp_path / "trace.jsonl", records), tmp_path / "scheduler_timestamps"
    done = run("convert", str(path), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == ORIGINAL


@pytest.mark.parametrize("name", ["trace.jsonl", "soft", "hard", "trace.jsonl.1"])
@pytest.mark.parametrize("forced", [[], ["--force"]])
def test_the_trace_that_is_read_is_not_written_over(
    trace: Path, name: str, forced: list[str]
) -> None:
    folder, whole = trace.parent, trace.read_bytes()
    older = folder / "trace.jsonl.1"
    older.write_bytes(whole)
    (folder / "soft").symlink_to(trace)
    (folder / "hard").hardlink_to(trace)
    result = run("convert", str(trace), "--out", str(folder / name), *forced)
    assert result.exit_code == 1
    assert "is the trace itself, which would be lost" in " ".join(result.output.split())
    assert trace.read_bytes() == older.read_bytes() == whole


@pytest.mark.parametrize(
    ("option", "name"), [([], "scheduler_timestamps"), (["--out", "there"], "there")]
)
def test_a_file_that_is_there_is_replaced_only_by_force(
    trace: Path, option: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    there = Path(name)
    there.write_text("precious")
    words = ["convert", str(trace), *option]
    refused = run(*words)
    assert refused.exit_code == 1
    assert f"{name} exists and would be lost" in " ".join(refused.output.split())
    assert there.read_text() == "precious"
    assert run(*words, "--force").exit_code == 0
    assert there.read_text() != "precious"


def test_a_trace_of_several_files_is_read_from_the_oldest_on(trace: Path, tmp_path: Path) -> None:
    whole = trace.read_bytes().splitlines(keepends=True)
    path = tmp_path / "parts" / "trace.jsonl"
    path.parent.mkdir()
    for place, part in enumerate([b"", b"".join(whole[12:]), b"".join(whole[:12])]):
        path.with_name(f"trace.jsonl.{place}" if place else "trace.jsonl").write_bytes(part)
    source = Source(path)
    told = list(source.records())
    assert told == list(Source(trace).records())
    assert source.num_bad == 0
    link = tmp_path / "link"
    link.symlink_to(path)
    assert list(Source(link).records()) == told
    assert list(Source(path.with_name("trace.jsonl.2")).records()) == told[:12]


def test_an_older_file_that_cannot_be_opened_is_told_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t", small())
    path.with_name(f"{path.name}.1").write_bytes(path.read_bytes())
    source, opened = Source(path), Path.open

    def few(self: Path, *args: Any) -> Any:
        if self.suffix == ".1":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(self, *args)

    monkeypatch.setattr(Path, "open", few)
    with pytest.raises(ToldError, match=r"\.1 cannot be read \(Too many open files\)"):
        list(source.records())


def test_a_trace_that_moves_while_it_is_opened_is_read_once_and_whole(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "moving" / "trace.jsonl"
    path.parent.mkdir()
    whole = trace.read_bytes().splitlines(keepends=True)
    path.with_name("trace.jsonl.1").write_bytes(b"".join(whole[:12]))
    path.write_bytes(b"".join(whole[12:]))
    source, opened = Source(path), Path.open

    def moves_then(each: Path, *how: str) -> Any:
        file = opened(each, *how)
        if each == path:
            path.with_name("trace.jsonl.1").rename(path.with_name("trace.jsonl.2"))
            path.rename(path.with_name("trace.jsonl.1"))
        return file

    monkeypatch.setattr(Path, "open", moves_then)
    assert list(source.records()) == [json.loads(line) for line in whole]


def test_pins_of_turns_side_by_side_stay_pairs() -> None:
    pin = {"decision": "pin", "ttl_s": 4.0}
    jobs = write_original(
        [
            record("decision", 1.0, turn=1, **pin),
            record("decision", 2.0, turn=2, **pin),
            record("pin_end", 2.0, cause="superseded", held_s=1.0),
            record("pin_end", 3.0, cause="expired", held_s=1.0),
        ]
    )
    keys = [next(iter(each)) for each in jobs["job:p"]]
    assert [key for key in keys if "pinned" in key] == [
        *("pinned_time", "unpinned_time", "pinned_time", "unpinned_time")
    ]


# --- a terminal of 80 columns -----------------------------------------------------------------
CLIENTS = {
    "p0": "claude-code:8f14e45f-ceea-467a-9538-1b2f47f3e001",
    "p1": "codex:0199f0c2-7d1e-7c51-9a30-5ce1b2f47f3e",
    "p2": "opencode:ses_5f2b8c9d1ffeabcdefghijklmn",
}


@pytest.mark.parametrize("command", [["analyze"], ["explain", "--trace"]])
def test_a_recorded_trace_of_three_clients_reads_at_80_columns(
    tmp_path: Path, command: list[str]
) -> None:
    """A real server's trace (tests/server/record_run.py), with names as these clients give."""
    root = Path(__file__).parents[2]
    text = (root / "bench" / "tests" / "vllm" / "recorded" / "run.jsonl").read_text()
    for plain, name in CLIENTS.items():
        assert f'"program":"{plain}"' in text
        text = text.replace(f'"program":"{plain}"', f'"program":"{name}"')
    (tmp_path / "trace.jsonl").write_text(text)
    path = str(tmp_path / "trace.jsonl")
    narrow, wide = (run(*command, path, columns=columns) for columns in (80, 200))
    assert narrow.exit_code == 0, narrow.output
    assert max(map(len, narrow.output.splitlines())) <= 80
    assert len(last_words(narrow.output)) > 10
    assert last_words(narrow.output) == last_words(wide.output), "80 columns cut something off"
