"""bench/disk: each arm moves every byte, and the table says what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("rich")

from rich.console import Console

from bench.disk import __main__ as bench
from bench.disk import fio
from bench.disk.rig import Sample, Shape, Threads
from continuum_connector.tools.cli.ending import ToldError

KIB64 = 64 * 1024


def shown(results: list[dict[str, object]]) -> str:
    console = Console(width=bench.WIDTH, record=True, quiet=False)
    with console.capture() as captured:
        console.print(bench.table(results))
    return captured.get()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_threads_move_all_slots_and_leave_no_file(tmp_path: Path, writes: bool, sums: bool) -> None:
    threads = Threads(tmp_path, Shape(KIB64, 4, 20 * KIB64, writes), sums)
    before = threads._disk.raw_state().num_bytes[0 if writes else 1]
    sample = threads.sample()
    moved = threads._disk.raw_state().num_bytes[0 if writes else 1] - before
    assert moved == 20 * KIB64
    assert sample.gb_per_s > 0
    threads.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not fio.is_here(), reason="needs fio")
@pytest.mark.parametrize("writes", [False, True])
def test_fio_moves_the_same_bytes(tmp_path: Path, writes: bool) -> None:
    rival = fio.Fio(tmp_path, Shape(KIB64, 4, 20 * KIB64, writes))
    assert rival.path.stat().st_size == 20 * KIB64
    assert rival.sample().gb_per_s > 0
    rival.close()
    assert list(tmp_path.iterdir()) == []


def test_a_shape_is_measured_and_shown_and_every_sample_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "is_here", lambda: False)
    result = bench.measure(tmp_path, Shape(KIB64, 2, 4 * KIB64, writes=False), num_rounds=3)
    assert [set(each) for each in result["rounds"]] == [{bench.SUMMED, bench.UNSUMMED}] * 3
    text = shown([result])
    assert "read 64 KiB, 2 deep" in text
    assert "ms/GB" in text
    options = bench.parse([str(tmp_path), "--quick"])
    kept = json.loads(json.dumps(bench.document(options, [result])))
    assert kept["results"][0]["shape"] == asdict(result["shape"])
    assert len(kept["results"][0]["rounds"]) == 3


def test_ratios_are_taken_round_by_round() -> None:
    rounds = [
        {bench.SUMMED: Sample(ours, 9.0), bench.RIVAL: Sample(theirs, 1.0)}
        for ours, theirs in ((1.0, 2.0), (4.0, 4.0), (3.0, 1.0))
    ]
    assert bench.ratio(rounds, bench.RIVAL) == "1.00 (0.50 to 3.00)"
    assert bench.cpu(rounds, bench.SUMMED) == "9 ms/GB"
    assert bench.ratio(rounds, bench.UNSUMMED) == "-"


def test_a_folder_in_memory_or_none_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ToldError, match="is no folder"):
        bench.refuse_memory(tmp_path / "none")
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("needs /dev/shm")
    with pytest.raises(ToldError, match="lies in memory"):
        bench.refuse_memory(shm)
