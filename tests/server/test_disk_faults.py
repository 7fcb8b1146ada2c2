"""A disk that fails under a real server: every answer is right, and DRAM stays.

The faults are those of faulty_disk.c, between the native library and the system, and of the test
itself, which writes into the file. A block that is wrong would show: answers are compared.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import VllmServer
from tests.fakes import mount_tmpfs
from tests.server.alerts import firing
from tests.server.disks import (
    disk_hits,
    failures,
    flip,
    flush,
    is_up,
    kill,
    last_turns,
    nudge,
    on_disk,
    quiet,
    slab,
    turns,
    used,
    with_disk,
)
from tests.server.helpers import (
    PROGRAMS,
    Dialog,
    eventually,
    in_flight,
    log_of,
    play,
    play_at_once,
    terminate,
    tokens_of,
)

EIO, ENOSPC = 5, 28
by_hand = pytest.mark.skipif(
    "TEST_DISK_ALL" not in os.environ,
    reason="a server or a hang of a minute for what tests/native shows: TEST_DISK_ALL=1",
)
SMALL = [Dialog(f"small-{n}", tokens_of(70, f"small {n}"), []) for n in range(4)]  # a slot each


@dataclass
class Faults:
    """What of the disk fails just now; `env` is for the server."""

    control: Path
    env: dict[str, str]

    @contextmanager
    def of(self, *lines: str) -> Iterator[None]:
        self.control.write_text("".join(f"{line}\n" for line in lines))
        try:
            yield
        finally:
            self.control.write_text("")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for faulty_disk.c")
    source, made = Path(__file__).with_name("faulty_disk.c"), tmp_path_factory.mktemp("faulty")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    library = made / "faulty.so"
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def faults(library: Path, tmp_path: Path) -> Faults:
    control = tmp_path / "faults"
    control.write_text("")
    return Faults(control, {"LD_PRELOAD": str(library), "FAULTY_DISK": str(control)})


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path, faults: Faults) -> Iterator[Callable[..., VllmServer]]:
    """Start a server on this test's disk; all are stopped."""
    started: list[VllmServer] = []

    def begin(name: str, **more: Any) -> VllmServer:
        options = with_disk(tmp_path / "disk", **more)
        server = VllmServer(tiny_model, f"test-faulty-{name}", env=faults.env, **options)
        started.append(server)
        server.start()
        return server

    yield begin
    for server in started:
        server.stop()


def stored(server: VllmServer) -> float:
    """Blocks that went to DRAM so far."""
    return server.metric("continuum:stored_blocks_total")


def oldest(server: VllmServer) -> float:
    """Age of the oldest read or write under way, in seconds."""
    return server.metric("continuum:disk_oldest_op_seconds")


def saved(server: VllmServer, folder: Path, program: Dialog) -> set[int]:
    """Ask for a program's answer, and say in which slots it is once it is on disk alone."""
    before = used(folder)
    play(server, [program])
    quiet(server)
    slots = used(folder) - before
    assert len(slots) == 1
    flush(server, program.name)
    return slots


def test_a_torn_write_a_flipped_bit_a_full_disk_and_a_failing_one_never_change_an_answer(
    start: Callable[..., VllmServer], faults: Faults, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    server = start("first")
    eventually(lambda: is_up(server))
    expected, right = (play(server, each, cold=True) for each in (SMALL, PROGRAMS))
    first = play(server, turns(PROGRAMS, 2))
    quiet(server)
    well = server.metrics()

    with faults.of("write tear 8192"):
        saved(server, folder, SMALL[0])
    assert play(server, SMALL[:1]) == expected[:1]
    assert failures(server, "corrupt") == 1

    flip(folder, saved(server, folder, SMALL[1]))
    assert play(server, SMALL[1:2]) == expected[1:2]
    assert failures(server, "corrupt") == 2
    quiet(server)
    assert about_disk(firing(well, server.metrics(), tmp_path)) == {"ContinuumDiskErrors"}

    room = server.metrics()
    with faults.of(f"write errno {ENOSPC}"):
        for dialog in SMALL[2:]:  # and the flush: three attempts, and no more for ten minutes
            play(server, [dialog])
            quiet(server)
        assert failures(server, "enospc") > 0
        flush(server, "full")
        assert about_disk(firing(room, server.metrics(), tmp_path, well)) == {
            "ContinuumDiskReadOnly"
        }
        known = disk_hits(server)
        again = play(server, last_turns(PROGRAMS, first)[:2])
        assert [a + b for a, b in zip(first[:2], again, strict=True)] == right[:2]
        assert disk_hits(server) > known, "what is on a full disk is read"
    assert is_up(server)

    flush(server, "broken")
    with faults.of(f"read errno {EIO}"):
        assert play_at_once(server, PROGRAMS) == right
    eventually(lambda: not is_up(server))
    assert failures(server, "eio") >= 3
    known = stored(server)
    broken = server.metrics()
    assert play(server, PROGRAMS) == right
    eventually(lambda: stored(server) > known)  # DRAM serves on
    eventually(lambda: in_flight(server) == 0)
    assert about_disk(firing(broken, server.metrics(), tmp_path, well)) == {"ContinuumDiskDown"}
    assert log_of(server).count("No disk tier: ") == 1
    assert "Traceback" not in log_of(server)
    kill(server)

    # Flipped while nothing runs.
    flip(folder, used(folder))
    server = start("second")
    eventually(lambda: is_up(server) and on_disk(server) > 0)
    assert play_at_once(server, PROGRAMS) == right
    assert failures(server, "corrupt") > 0
    assert "Traceback" not in log_of(server)


def about_disk(alerts: set[str]) -> set[str]:
    """Without those about what this file does to evict KV: turns of no program, again and again."""
    return {alert for alert in alerts if "Disk" in alert}


@by_hand
def test_a_disk_too_slow_for_its_deadline_is_given_up_and_the_tier_stays(
    start: Callable[..., VllmServer], faults: Faults
) -> None:
    server = start("slow", disk_timeout_s=1)
    eventually(lambda: is_up(server))
    programs = PROGRAMS[:2]
    right = play(server, programs, cold=True)
    first = play(server, turns(programs, 2))
    quiet(server)
    flush(server, "slow")
    with faults.of("read sleep 4000"):
        again = play(server, last_turns(programs, first))
        assert [a + b for a, b in zip(first, again, strict=True)] == right
    eventually(lambda: server.metric("continuum:reads_total", outcome="cancelled") > 0)
    assert is_up(server)
    assert "Traceback" not in log_of(server)


@by_hand
def test_a_disk_that_hangs_is_left_and_dram_serves_on(
    start: Callable[..., VllmServer], faults: Faults, tmp_path: Path
) -> None:
    server = start("hung")
    eventually(lambda: is_up(server))
    right = play(server, PROGRAMS, cold=True)
    quiet(server)
    well = server.metrics()
    with faults.of("write hang 0", "read hang 0"):
        assert play(server, PROGRAMS) == right
        eventually(lambda: nudge(server) or oldest(server) > 30)
        hanging = server.metrics()
        assert "ContinuumDiskHangs" in firing(well, hanging, tmp_path)
        eventually(lambda: nudge(server) or not is_up(server), timeout_s=240)
        assert play(server, PROGRAMS) == right
        assert server.healthy()
        assert server.metric("continuum:dram_capacity_blocks") > 0
        terminate(server)
    assert "this process, and so its GPU, cannot end" in log_of(server)


@by_hand
def test_the_alert_of_a_disk_that_hung_ends_once_it_answers(
    start: Callable[..., VllmServer], faults: Faults, tmp_path: Path
) -> None:
    server = start("thawed")
    eventually(lambda: is_up(server))
    play(server, PROGRAMS, cold=True)
    quiet(server)
    well = server.metrics()
    with faults.of("write hang 0", "read hang 0"):
        play(server, PROGRAMS)
        eventually(lambda: nudge(server) or oldest(server) > 5)
        eventually(lambda: not is_up(server), timeout_s=240)  # nobody asks for anything
        assert "ContinuumDiskHangs" in firing(well, server.metrics(), tmp_path)
    eventually(lambda: oldest(server) == 0)
    thawed = server.metrics()
    assert about_disk(firing(thawed, thawed, tmp_path, well)) == {"ContinuumDiskDown"}
    assert log_of(server).count("No disk tier: ") == 1


def locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700)
    descriptor = os.open(slab(folder), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def read_only(folder: Path) -> Iterator[None]:
    with ExitStack() as ends:
        mount_tmpfs(folder, ends, "size=1g", "ro")
        yield


@by_hand
@pytest.mark.parametrize(
    ("case", "said"),
    [("full", "No space left"), ("locked", "another process"), ("read-only", "Read-only")],
)
def test_a_disk_that_cannot_be_had_at_start_is_no_tier_in_a_sentence(
    start: Callable[..., VllmServer], faults: Faults, tmp_path: Path, case: str, said: str
) -> None:
    prepare = {"locked": locked, "read-only": read_only}.get(case, lambda _folder: iter([None]))
    holding = contextmanager(prepare)(tmp_path / "disk")
    with holding, faults.of(f"allocate errno {ENOSPC}"):
        server = start(case)
        assert play(server, SMALL) == play(server, SMALL, cold=True)
        assert not is_up(server)
        eventually(lambda: stored(server) > 0)
        log = log_of(server)
        assert log.count("No disk tier: ") == 1
        assert said in log
        assert "Traceback" not in log
        server.stop()
