"""Agents overrun DRAM and come back from disk, over a kill too; other weights find nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.serve.server import VllmServer
from tests.server.disks import (
    cached,
    computed,
    disk_hits,
    failures,
    flush,
    is_up,
    kill,
    last_turns,
    on_disk,
    play_saved,
    quiet,
    turns,
    with_disk,
)
from tests.server.helpers import (
    PROGRAMS,
    Dialog,
    dialogs,
    eventually,
    ledger_closes,
    log_of,
    play,
    tokens_of,
)

OTHERS = [
    Dialog(f"other-{d.name}", tokens_of(len(d.prompt), f"o{i}"), d.tools)
    for i, d in enumerate(dialogs(4, rounds=3, first=700, tool=300))
]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A folder whose weights a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def change_weights(model: Path) -> None:
    """Others, in a file of the same name and size."""
    path = model / "model.safetensors"
    size = path.stat().st_size
    tensors = {name: np.flip(value, axis=-1).copy() for name, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == size


def start(model: Path, folder: Path, name: str, **more: Any) -> VllmServer:
    server = VllmServer(model, f"test-disk-{name}", **{**with_disk(folder), **more})
    server.start()
    return server


@pytest.fixture
def lives() -> Iterator[list[VllmServer]]:
    """Whatever is in it is stopped."""
    found: list[VllmServer] = []
    yield found
    for server in found:
        server.stop()


def test_agents_come_back_from_disk_and_go_on_over_a_kill_with_equal_answers(
    model: Path, folder: Path, lives: list[VllmServer]
) -> None:
    """A cold request, whose salt no other has, computes all of its prompt."""
    server = start(model, folder, "first")
    lives.append(server)
    eventually(lambda: is_up(server))
    right = play(server, PROGRAMS, cold=True)

    # What a last turn costs where nothing is killed; by then these are on disk alone.
    before = play_saved(server, turns(OTHERS, 2))
    flush(server, "one")
    known, hits = computed(server), disk_hits(server)
    play(server, last_turns(OTHERS, before))
    cost, of_disk = computed(server) - known, disk_hits(server) - hits
    assert of_disk > 0

    first = play_saved(server, turns(PROGRAMS, 2))
    flush(server, "two")
    assert server.metric("continuum:reads_total", outcome="failed") == 0
    assert ledger_closes(server.metrics())
    kill(server)

    server = start(model, folder, "second")
    lives.append(server)
    eventually(lambda: is_up(server) and on_disk(server) > 0)
    known = computed(server)
    rest = last_turns(PROGRAMS, first)
    second = play(server, rest)
    assert [a + b for a, b in zip(first, second, strict=True)] == right
    again = computed(server) - known
    print(f"\ncomputed {again:.0f} prompt tokens after the kill, {cost:.0f} without one")
    assert again <= 1.1 * cost
    assert disk_hits(server) > 0
    assert failures(server, "corrupt") == 0
    flush(server, "three")
    found = cached(server, PROGRAMS[0].prompt)
    assert found["disk"] > 500
    assert found["vram"] == 0
    assert "Traceback" not in log_of(server)
    kill(server)

    change_weights(model)
    server = start(model, folder, "other-weights")
    lives.append(server)
    eventually(lambda: is_up(server))
    assert on_disk(server) == 0
    play(server, turns(PROGRAMS, 1))  # which this life has not seen
    assert disk_hits(server) == 0
    other = play(server, PROGRAMS)
    assert other == play(server, PROGRAMS, cold=True) != right


@pytest.mark.release
def test_without_the_weights_in_the_namespace_the_kv_of_the_old_ones_would_be_read(
    model: Path, folder: Path, lives: list[VllmServer]
) -> None:
    """So the test above would notice."""
    options = with_disk(folder, "undigested")
    server = VllmServer(model, "test-disk-old-weights", **options)
    lives.append(server)
    server.start()
    eventually(lambda: is_up(server))
    play(server, PROGRAMS)
    quiet(server)
    flush(server, "old")
    kill(server)

    change_weights(model)
    server = VllmServer(model, "test-disk-new-weights", **options)
    lives.append(server)
    server.start()
    eventually(lambda: is_up(server) and on_disk(server) > 0)
    new = play(server, turns(PROGRAMS, 1))
    assert disk_hits(server) > 0
    assert new != play(server, turns(PROGRAMS, 1), cold=True)


NUM_KILLS = int(os.environ.get("TEST_DISK_KILLS", "3"))


@pytest.mark.release
def test_kills_at_random_times_never_leave_a_wrong_block(
    tiny_model: Path, folder: Path, lives: list[VllmServer]
) -> None:
    """TEST_DISK_KILLS=50 for as many as the release has; each takes as long as a server starts."""
    random, num_answers, num_hits = Random(20), 0, 0.0
    right: list[list[list[int]]] = []
    for number in range(NUM_KILLS + 1):
        server = start(tiny_model, folder, f"kill-{number}")
        lives.append(server)
        eventually(lambda server=server: is_up(server))
        right = right or play(server, PROGRAMS, cold=True)
        played = list(zip(PROGRAMS, right, strict=True))
        rounds = itertools.repeat(played, 3)
        if number < NUM_KILLS:
            killer = Timer(random.uniform(0.2, 8.0), os.killpg, (server.pid, signal.SIGKILL))
            killer.start()
            rounds = itertools.repeat(played)  # at work until it is killed
        try:
            for program, answers in itertools.chain.from_iterable(rounds):
                assert play(server, [program]) == [answers]
                num_answers += 1
                num_hits = max(num_hits, disk_hits(server))
        except (OSError, HTTPException):
            assert number < NUM_KILLS, "nobody killed the last one"
            killer.join()  # a request may fail before; afterwards the pid is another's
        server.stop()
    print(f"\n{num_answers} programs were right over {NUM_KILLS} kills, {num_hits:.0f} hits")
    assert num_hits > 0
