"""No block changes under a copy, and no thread of ours races, on a server with slow copies.

The library is built with ThreadSanitizer and its simulator watches: a store that the connector
lets go of too early fails nothing otherwise. The rest of the process is not instrumented. So
TSan sees races among what the library's own code reads and writes; that vLLM wrote a block which
a copy stood on is for the watch to see. Where TSan cannot run, the watch does so alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from tests.native.cpp import REPO, only_builder
from tests.server.altered import transfer_config
from tests.server.conftest import DRAM_BYTES, Stock
from tests.server.helpers import (
    BLOCK,
    PROGRAMS,
    dialogs,
    dram_hits,
    eventually,
    in_flight,
    log_of,
    play,
    play_at_once,
    reset,
)

MBPS = 20  # 15 ms for a block: a turn's store takes as long as several steps
VIOLATION = re.compile(r"ckv simulator: block \d+ of (?:store|load) \d+ was written before .*")

# One engine's lane sums a block, unasked and unwaited for, where another's completion is written.
RACE = """
import ctypes
import numpy as np
from continuum_connector.worker.abi import Direction, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine
blocks = (ctypes.c_char * 8192)()
layout = Layout((Region(ctypes.addressof(blocks), 4096, 0, 4096),), 2, 4096, "cpu", 0)
one, other = (NativeEngine("sim", layout, 2) for _ in range(2))
other.submit(Direction.STORE, *[np.empty(0, np.int32)] * 2, 1)
assert other.wait(1, 20.0)
one.submit(Direction.STORE, *[np.zeros(1, np.int32)] * 2, 1)
other._quick.ckv_poll(other._handle, blocks, 1)
while not one._pending.value:
    pass
"""


@dataclass(frozen=True)
class Tsan:
    """A library built with TSan; `runtime` is empty where no process can load it, and `why`."""

    library: Path
    runtime: str
    reports: Path
    why: str

    def environment(self, name: str) -> dict[str, str]:
        """For a process whose reports go by that name. Without TSan: the package's library."""
        if self.why:
            return {}
        # Accesses that the C library does for others are most of what TSan would look at.
        options = f"ignore_interceptors_accesses=1 exitcode=0 log_path={self.reports / name}"
        return {
            "LD_PRELOAD": self.runtime,
            "TSAN_OPTIONS": options,
            "CKV_LIBRARY": str(self.library),
        }

    def races(self, name: str) -> list[str]:
        """The reports of that name that have a frame of ours."""
        found: list[str] = []
        for path in self.reports.glob(f"{name}.*"):
            found += path.read_text(errors="replace").split("==================\n")
        return [report for report in found if self.library.name in report]

    def skip_without(self) -> None:
        if self.why:
            pytest.skip(self.why)


def said(command: Sequence[str | Path], **environment: str) -> tuple[str, str]:
    """What a command printed, and if it failed, its complaint."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            cwd=REPO,
            timeout=300,
            env={**os.environ, **environment},
        )
    except OSError as error:
        return "", str(error)
    return done.stdout.strip(), done.stderr[-500:] or "failed" if done.returncode else ""


@pytest.fixture(scope="module")
def tsan(tmp_path_factory: pytest.TempPathFactory) -> Tsan:
    """The preset `tsan`, in its folder, so that a second run has little to build."""
    runtime, why = said(["g++", "-print-file-name=libtsan.so"])
    with only_builder("tsan") as folder:
        for command in (
            ["cmake", "--preset", "tsan"],
            ["cmake", "--build", "--preset", "tsan", "--target", "ckv", "-j", "2"],
            ["env", f"LD_PRELOAD={runtime}", sys.executable, "-c", "pass"],
        ):
            why = why or said(command)[1]
    why = f"nothing can be run under ThreadSanitizer here: {why}" if why else ""
    return Tsan(folder / "libckv.so", runtime, tmp_path_factory.mktemp("tsan"), why)


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, stores hold nothing."""
    return tmp_path_factory.mktemp("fault") / "unheld"


@pytest.fixture(scope="module")
def watched(tiny_model: Path, stock: Stock, tsan: Tsan, fault: Path) -> Iterator[VllmServer]:
    """Turns leave for DRAM at once, so only their stores hold their blocks."""
    keys = {"policy": "fixed_ttl", "ttl_s": 0, "dram_bytes": DRAM_BYTES}
    with VllmServer(
        tiny_model,
        "test-lifetime",
        num_blocks=stock.num_blocks,
        kv_transfer_config=transfer_config("unheld", keys),
        env={
            "CKV_SIM_WATCH": "1",
            "CKV_SIM_MBPS": str(MBPS),
            "TEST_FAULT_FILE": str(fault),
            **tsan.environment("server"),
        },
    ) as server:
        yield server


def violations(server: VllmServer) -> list[str]:
    return VIOLATION.findall(log_of(server))


def test_no_block_changes_under_a_copy_and_no_thread_of_ours_races(
    watched: VllmServer, stock: Stock, tsan: Tsan
) -> None:
    assert play_at_once(watched, PROGRAMS) == stock.answers
    assert play(watched, PROGRAMS) == stock.answers
    eventually(lambda: in_flight(watched) == 0)
    assert dram_hits(watched) > 10 * BLOCK
    assert watched.metric("continuum:stored_blocks_total") > 100
    assert watched.metric("continuum:transfer_failures_total") == 0
    assert violations(watched) == []
    assert tsan.races("server") == []


def test_a_store_that_holds_nothing_is_noticed(watched: VllmServer, fault: Path) -> None:
    reset(watched)
    assert violations(watched) == []
    fault.touch()
    try:
        # Others than before: their blocks are in neither tier.
        play_at_once(watched, dialogs(5, rounds=2, first=900, tool=200))
        eventually(lambda: in_flight(watched) == 0)
    finally:
        fault.unlink()
    found = violations(watched)
    print(f"\n{len(found)} violations, the first: {found[0] if found else ''}")
    assert any(" of store " in each for each in found)


def test_a_race_in_the_library_is_reported(tsan: Tsan) -> None:
    tsan.skip_without()
    _, why = said([sys.executable, "-c", RACE], CKV_SIM_WATCH="1", **tsan.environment("race"))
    assert not why
    assert tsan.races("race"), "a thread wrote what another one read"
