"""bench.disk.beside: steps go on while the disk is read, and only they are timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.disk import beside
from bench.disk.beside import Span, Step, span
from bench.disk.rig import Shape, Threads

KIB64 = 64 * 1024


def test_steps_ask_for_more_and_wait_for_nothing(tmp_path: Path) -> None:
    threads = Threads(tmp_path, Shape(KIB64, 4, 40 * KIB64, False), sums=True)
    before = threads._disk.raw_state().num_bytes[0]
    seen: list[int] = []

    def step() -> None:
        seen.append(len(threads._under_way))

    alone = span(step, threads, with_reads=False, seconds=0.05)  # type: ignore[arg-type]
    assert set(seen) == {0}
    assert alone.gb_per_s == 0.0
    assert threads._disk.raw_state().num_bytes[0] == before
    for _ in range(100):  # a busy drive answers in a later span
        seen.clear()
        read = span(step, threads, with_reads=True, seconds=0.2)  # type: ignore[arg-type]
        assert set(seen) == {3}
        assert len(read.steps) == len(seen)
        if read.gb_per_s > 0.0:
            break
    assert read.gb_per_s > 0.0
    assert not threads._under_way
    threads.close()
    assert list(tmp_path.iterdir()) == []


def test_pairs_are_told_as_ratios_and_take_turns() -> None:
    alone, read = Span([0.010, 0.010], 0.01, 0.0), Span([0.012, 0.010], 0.0105, 2.0)
    text = beside.told([(read, alone)] * 3)
    assert "by the clock: median 1.100" in text
    assert "CPU time of its thread:              median 1.050" in text
    assert "2.00 GB/s" in text
    assert [beside.order(number)[number % 2] for number in range(4)] == [True] * 4


def test_a_step_is_as_long_as_was_asked_for() -> None:
    short, long = Step(0.001), Step(0.1)
    assert long.num_bytes > 10 * short.num_bytes
    assert long.num_spins > 10 * short.num_spins


def test_it_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        beside.parse(["--help"])
    assert "--step-ms" in capsys.readouterr().out
