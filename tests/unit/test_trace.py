"""Trace writes every record, never makes its caller wait, and never kills the engine."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import continuum_connector
from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import ConfigError
from continuum_connector.observe import trace as trace_module
from continuum_connector.observe.trace import (
    EVENTS,
    NullTrace,
    Trace,
    TraceFile,
    older_files,
    open_trace,
)
from continuum_connector.programs.program import IdentitySource

PACKAGE = Path(continuum_connector.__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for the writer's thread, which tells nobody; a minute is the failure."""
    deadline = time.monotonic() + 60.0
    while not is_true():
        assert time.monotonic() < deadline, "the writer's thread did not get there in a minute"
        time.sleep(0.001)


def test_each_record_is_one_json_line_with_both_clocks(path: Path) -> None:
    trace = Trace(str(path), wall=lambda: 1_700_000_000.5)
    trace.record("decision", 12.25, program="p", decision="pin", ttl_s=2.0, blocks=(1, 2))
    trace.record("pin_end", 14.25, program="p", cause="expired")
    trace.close()
    assert path.read_bytes().count(b"\n") == 2
    assert lines(path) == [
        {
            "t": 1_700_000_000.5,
            "now": 12.25,
            "event": "decision",
            "program": "p",
            "decision": "pin",
            "ttl_s": 2.0,
            "blocks": [1, 2],
        },
        {
            "t": 1_700_000_000.5,
            "now": 14.25,
            "event": "pin_end",
            "program": "p",
            "cause": "expired",
        },
    ]
    assert trace.take_dropped() == 0


def test_records_keep_their_order_and_none_is_missing_after_close(path: Path) -> None:
    trace = Trace(str(path))
    for i in range(5_000):
        trace.record("decision", float(i), turn=i)
    trace.close()
    assert [record["turn"] for record in lines(path)] == list(range(5_000))


def test_enums_line_breaks_and_odd_text_are_written_as_json(path: Path) -> None:
    trace = Trace(str(path))
    trace.record(
        "arrive", 0.0, source=IdentitySource.LINEAGE, program="a\nb\u2028\u00e4", cause=KeyError
    )
    trace.close()
    (record,) = lines_by_newline(path)
    assert record["source"] == "lineage"
    assert record["program"] == "a\nb\u2028\u00e4"


def lines_by_newline(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_a_record_that_is_not_json_is_lost_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless: list[Any] = []
    endless.append(endless)
    trace = Trace(str(path))
    trace.record("decision", 0.0, turn=0)
    trace.record("decision", 1.0, turn=endless)
    trace.record("decision", 2.0, turn=2)
    trace.close()
    assert [record["turn"] for record in lines(path)] == [0, 2]
    assert trace.take_dropped() == 1
    assert "'decision' is not JSON" in caplog.text


def test_a_second_trace_appends_and_ends_a_line_that_a_crash_cut_short(path: Path) -> None:
    path.write_text('{"event":"start"}\n{"event":"deci')
    trace = Trace(str(path))
    trace.record("start", 0.0)
    trace.close()
    first, cut, last = path.read_text().splitlines()
    assert (first, cut) == ('{"event":"start"}', '{"event":"deci')
    assert json.loads(last)["event"] == "start"


def test_an_empty_file_does_not_begin_with_an_empty_line(path: Path) -> None:
    path.touch()
    trace = Trace(str(path))
    trace.record("start", 0.0)
    trace.close()
    assert len(path.read_text().splitlines()) == 1


def test_records_reach_the_disk_without_close(path: Path) -> None:
    trace = Trace(str(path))
    trace.record("start", 0.0)
    wait_until(lambda: path.stat().st_size > 0)
    trace.close()


def test_a_full_queue_drops_the_record_and_counts_it(path: Path) -> None:
    os.mkfifo(path)  # nobody reads, so the writer's thread sticks once 64 KiB are in
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    trace = Trace(str(path), max_queued=10)
    text = "x" * 200_000
    num_records = 40
    for turn in range(num_records):
        trace.record("decision", 0.0, turn=turn, text=text if turn == 0 else "")
    num_dropped = trace.take_dropped()
    assert num_records - 12 <= num_dropped <= num_records - 10
    assert trace.take_dropped() == 0
    select.select([reader], [], [])  # the writer has taken the queue and sticks in its write
    trace.record("stop", 0.0)
    os.set_blocking(reader, True)
    received: list[bytes] = []
    drain = threading.Thread(
        target=lambda: received.extend(iter(lambda: os.read(reader, 65536), b""))
    )
    drain.start()
    trace.close()
    drain.join()
    os.close(reader)
    assert trace.take_dropped() == 0
    events = [json.loads(line)["event"] for line in b"".join(received).splitlines()]
    assert events == ["decision"] * (num_records - num_dropped) + ["stop"]


def test_a_record_after_close_is_counted_as_dropped_and_close_is_idempotent(path: Path) -> None:
    trace = Trace(str(path))
    trace.close()
    trace.close()
    trace.record("decision", 0.0)
    assert path.read_bytes() == b""
    assert trace.take_dropped() == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_warns_once_counts_and_lets_the_engine_live(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "BATCH_S", 0.0)
    trace = Trace("/dev/full")
    for turn in range(3):
        trace.record("decision", 0.0, turn=turn)
        wait_until(lambda done=turn: trace._num_lost > done)  # each record a write of its own
    trace.close()
    assert trace.take_dropped() == 3
    assert trace.take_dropped() == 0
    (warning,) = caplog.records
    assert "trace_path = '/dev/full'" in warning.getMessage()
    assert "trace_dropped" in warning.getMessage()


@pytest.mark.parametrize("name", ["missing/trace.jsonl", "."])
def test_a_path_that_cannot_be_opened_stops_the_server_with_a_cure(
    tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / name)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        open_trace(ContinuumConfig(trace_path=path))
    text = str(caught.value)
    assert path in text  # value
    assert "would go unrecorded" in text  # consequence
    assert "writable directory" in text  # cure
    assert set(threading.enumerate()) <= before


def test_no_path_means_no_thread_no_file_and_the_same_interface() -> None:
    before = set(threading.enumerate())
    trace = open_trace(ContinuumConfig())
    assert isinstance(trace, NullTrace)
    assert not trace.enabled
    trace.record("decision", 0.0, program="p")
    assert trace.take_dropped() == 0
    trace.close()
    assert set(threading.enumerate()) <= before
    public = {name for name in dir(Trace) if not name.startswith("_")}
    assert public <= {name for name in dir(NullTrace) if not name.startswith("_")}


EXITS = {
    "main process": "write()",
    "forked child": (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=write)\n"
        "child.start(); child.join()"
    ),
}


@pytest.mark.parametrize("how", EXITS)
def test_a_trace_left_open_is_complete_when_its_process_exits(path: Path, how: str) -> None:
    code = (
        "import sys\n"
        "from continuum_connector.observe.trace import Trace\n"
        "def write():\n"
        "    global trace\n"
        "    trace = Trace(sys.argv[1])\n"
        "    for i in range(1000): trace.record('decision', float(i))\n" + EXITS[how]
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, str(path)], check=False)
    assert done.returncode == 0
    assert len(lines(path)) == 1000


# --- the file -----------------------------------------------------------------------------
def numbered(*numbers: int) -> bytes:
    return b"".join(b"%09d\n" % number for number in numbers)


def contents(path: Path) -> list[bytes]:
    """Of all files of a trace, the newest first."""
    return [each.read_bytes() for each in (path, *older_files(path))]


def test_a_trace_is_its_owners_alone_and_an_operators_mode_stays(path: Path) -> None:
    before = os.umask(0)
    try:
        TraceFile(str(path), 10).append(numbered(1))
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        TraceFile(str(path), 10).append(numbered(2))
    finally:
        os.umask(before)
    moved = path.with_name("trace.jsonl.1")
    assert [each.stat().st_mode & 0o777 for each in (moved, path)] == [0o640, 0o600]


def test_a_full_file_moves_and_the_oldest_of_them_goes(path: Path) -> None:
    file = TraceFile(str(path), max_bytes=20, max_files=3)
    for number in range(7):
        file.append(numbered(number))
    assert contents(path) == [numbered(6), numbered(4, 5), numbered(2, 3)]
    assert len(list(path.parent.iterdir())) == 3
    file.append(b"x" * 50 + b"\n")  # a batch is never cut, and an empty file never moves
    assert contents(path)[0] == b"x" * 50 + b"\n"
    file.append(numbered(8))
    assert contents(path)[:2] == [numbered(8), b"x" * 50 + b"\n"]


def test_without_a_bound_a_file_grows(path: Path) -> None:
    file = TraceFile(str(path))
    for number in range(100):
        file.append(numbered(number))
    assert contents(path) == [numbered(*range(100))]


def test_a_new_start_appends_and_moves_what_is_full_already(path: Path) -> None:
    path.write_bytes(numbered(*range(5)))
    TraceFile(str(path), max_bytes=50).append(numbered(5))
    TraceFile(str(path), max_bytes=50).append(numbered(6))
    assert contents(path) == [numbered(5, 6), numbered(*range(5))]


def test_a_link_stays_and_files_move_where_it_points_to(path: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    path.symlink_to(tmp_path / "volume" / "t")
    file = TraceFile(str(path), max_bytes=10)
    for number in range(2):
        file.append(numbered(number))
    assert path.is_symlink()
    assert contents(path) == [numbered(1), numbered(0)]
    assert sorted(each.name for each in (tmp_path / "volume").iterdir()) == ["t", "t.1"]


def test_engines_that_share_a_path_lose_nothing_and_move_it_once(path: Path) -> None:
    engines = [TraceFile(str(path), max_bytes=60, max_files=100) for _ in range(3)]
    for number in range(90):
        engines[number % 3].append(numbered(number))
    written = contents(path)
    assert b"".join(reversed(written)) == numbered(*range(90))
    assert {len(each) for each in written} == {60}


def test_who_finds_the_file_moved_by_another_under_the_lock_does_not_move_it_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (TraceFile(str(path), max_bytes=20, max_files=5) for _ in range(2))
    first.append(numbered(1, 2))
    flock = trace_module.fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(trace_module.fcntl, "flock", flock)
        second.append(numbered(3))  # while the first waits for the lock
        flock(descriptor, how)

    monkeypatch.setattr(trace_module.fcntl, "flock", late)
    first.append(numbered(4))
    assert contents(path) == [numbered(3, 4), numbered(1, 2)]


def test_who_cannot_move_a_full_file_keeps_no_other_engine_waiting(path: Path) -> None:
    first, second = (TraceFile(str(path), max_bytes=20, max_files=2) for _ in range(2))
    (path.with_name(f"{path.name}.1") / "folder").mkdir(parents=True)
    first.append(numbered(1, 2))
    failed = []

    def append(file: TraceFile) -> None:
        with pytest.raises(OSError, match="Is a directory"):
            file.append(numbered(3))
        failed.append(file)

    append(first)
    other = threading.Thread(target=append, args=[second], daemon=True)
    other.start()
    other.join(60.0)
    assert failed == [first, second]


def test_a_file_that_cannot_be_followed_is_closed_once(path: Path, tmp_path: Path) -> None:
    """Twice, and it would be somebody else's the second time."""
    folder = tmp_path / "volume"
    folder.mkdir()
    file = TraceFile(str(folder / "t"))
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        file.append(numbered(1))
    others = [os.open(path, os.O_CREAT | os.O_RDWR) for _ in range(3)]
    file.close()
    for other in others:
        os.close(other)


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_logrotate_and_rm_are_followed(path: Path, how: str) -> None:
    file = TraceFile(str(path))
    file.append(numbered(1))
    path.rename(path.with_name("elsewhere")) if how == "moved" else path.unlink()
    file.append(numbered(2))
    assert path.read_bytes() == numbered(2)


def test_ids_are_hashed_with_a_key_that_is_nowhere_else(path: Path) -> None:
    told = [
        ("arrive", {"program": "job:run-17", "request": "cmpl-run-17", "turn": 1}),
        ("decision", {"program": "job:run-17", "turn": 1, "why": "it pays"}),
        ("arrive", {"program": "job:run-18\ud800", "request": "cmpl-run-18"}),
        ("arrive", {"program": "anonymous:5f2c", "request": ""}),
        ("start", {"policy": "stock"}),
    ]
    for _ in range(2):
        trace = Trace(str(path), hashes_ids=True)
        for event, fields in told:
            trace.record(event, 0.0, **fields)
        trace.close()
    assert "run-1" not in path.read_text()
    first, second = lines(path)[:5], lines(path)[5:]
    assert first[0]["program"] == first[1]["program"] != first[2]["program"]
    assert re.fullmatch("hashed:[0-9a-f]{32}", first[0]["program"])
    assert re.fullmatch("hashed:[0-9a-f]{32}", first[0]["request"])
    assert first[0]["program"] != second[0]["program"], "a key of its own per process"
    assert first[1]["why"] == "it pays"
    assert first[3]["program"] == "anonymous:5f2c", "random as it is, and known to be nobody's"
    assert first[4]["policy"] == "stock"


def test_every_event_that_the_package_records_is_documented() -> None:
    for file in PACKAGE.rglob("*.py"):
        calls = re.findall(r'trace\.record\(\s*([^,]*"\w+"[^,]*)', file.read_text())
        for event in re.findall(r'"(\w+)"', " ".join(calls)):
            assert event in EVENTS, f"{file.name}: {event}"
