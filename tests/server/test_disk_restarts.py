"""A disk under servers that differ from the one before, and under one that is killed again and
again: what is foreign is never read, and all lives together keep to one file and one budget."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any

import pytest

from bench.serve.server import VllmServer
from bench.serve.tiny_model import LLAMA, ModelShape, make_model
from tests.server.conftest import MIDDLEWARE, ServerFactory
from tests.server.disks import (
    BLOCK_BYTES,
    disk_hits,
    is_up,
    kill,
    on_disk,
    quiet,
    turns,
    with_disk,
)
from tests.server.helpers import (
    PROGRAMS,
    dialogs,
    eventually,
    in_flight,
    ledger_closes,
    log_of,
    play,
)

DISK_BYTES = 1000 * BLOCK_BYTES
FIRST = turns(PROGRAMS, 1)  # more than DRAM holds

EVEN = replace(LLAMA, heads=4, kv_heads=2)  # divisible by two
TWO_RANKS: Mapping[str, Any] = {
    "args": (*MIDDLEWARE, "--tensor-parallel-size", "2"),
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
# Each server differs from the one before it: a word of why it begins anew, its model, its options.
LIVES: list[tuple[str, ModelShape, Mapping[str, Any]]] = [
    ("first time", EVEN, {}),
    ("dtype", EVEN, {"dtype": "bfloat16"}),
    ("cache", EVEN, {"block_size": 64, "num_blocks": 65}),
    ("ranks", EVEN, TWO_RANKS),
    ("ranks", EVEN, {}),
    ("because of other weights)", replace(EVEN, seed=8), {}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def taken(folder: Path) -> int:
    """Bytes of the disk that all files of blocks take."""
    return sum(each.stat().st_blocks * 512 for each in folder.glob("*.slab"))


def why_anew(server: VllmServer) -> str:
    """What the log says of the first rank's file, which it has begun anew."""
    [line] = [each for each in log_of(server).splitlines() if "dp0-rank0.slab (" in each]
    return line.partition("begun anew ")[2]


def test_what_a_server_unlike_this_one_left_is_never_read(
    server_factory: ServerFactory, folder: Path
) -> None:
    """A cold request, whose salt no other has, computes all of its prompt."""
    for number, (why, shape, options) in enumerate(LIVES):
        more = {**with_disk(folder, disk_bytes=DISK_BYTES), **options}
        server = server_factory(f"life-{number}", model=make_model(shape), **more)
        eventually(partial(is_up, server))
        quiet(server)
        assert on_disk(server) == 0
        answers = play(server, FIRST)
        assert disk_hits(server) == 0
        assert answers == play(server, FIRST, cold=True)
        assert why in why_anew(server)
        assert "Traceback" not in log_of(server)
        quiet(server)
        assert on_disk(server) > 0, "there is nothing that the next one must not read"
        kill(server)
    # A rank that is no more leaves its half, which `continuum check` names.
    assert taken(folder) <= DISK_BYTES + DISK_BYTES // 2


NUM_KILLS = 3  # test_disk.py kills as often as one likes
BUDGET = 160 * BLOCK_BYTES  # half of it is written freely: less than the first life has to write
# Each life plays two more than the one before it, so each has something new to write.
AGENTS = dialogs(4 + 2 * NUM_KILLS, rounds=2, first=700, tool=200)


@dataclass
class Life:
    """What was seen of one server, until shortly before its end."""

    hits: float = 0.0
    written: float = 0.0
    answers: list[tuple[int, list[list[int]]]] = field(default_factory=list, repr=False)


def lived(server: VllmServer, numbers: Iterable[int], life: Life) -> None:
    """Play these of AGENTS, one after the other."""
    for number in numbers:
        [answers] = play(server, [AGENTS[number]])
        life.answers.append((number, answers))
        life.hits = disk_hits(server)
        life.written = server.metric("continuum:disk_written_bytes_total")


def spent(folder: Path) -> float:
    """What a restart will find spent of the budget."""
    return float(json.loads((folder / "dp0-rank0.spent").read_text())["spent_bytes"])


def test_killed_at_random_times_all_lives_keep_to_one_budget_and_one_file(
    server_factory: ServerFactory, folder: Path
) -> None:
    """Nothing cold is asked before the end, for it would be written as well."""
    random = Random(4)
    lives: list[Life] = []
    options = with_disk(folder, disk_bytes=DISK_BYTES, disk_write_budget=BUDGET)
    for number in range(NUM_KILLS + 1):
        server = server_factory(f"killed-{number}", **options)
        eventually(partial(is_up, server))
        known = range(4 + 2 * number)
        lives.append(Life())
        if number == NUM_KILLS:
            lived(server, [*known, *known], lives[-1])
            break
        killer = Timer(random.uniform(3.0, 8.0), os.killpg, (server.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises((OSError, HTTPException)):  # at work until it is killed
            lived(server, itertools.cycle(known), lives[-1])
        server.stop()  # what is left of it
    eventually(lambda: in_flight(server) == 0)
    assert ledger_closes(server.metrics())
    written = sum(life.written for life in lives)
    print(f"\nof {BUDGET} bytes {written:.0f} written, {spent(folder):.0f} said; {lives}")
    assert 0.99 * written <= spent(folder) <= 1.1 * BUDGET
    assert taken(folder) <= DISK_BYTES
    assert lives[-1].hits > 0
    right = play(server, AGENTS, cold=True)
    assert all(got == right[each] for life in lives for each, got in life.answers)
    assert "Traceback" not in log_of(server)
