"""The lab against a real server: the same arrivals, the same decisions.

A run of `vllm serve` was recorded (tests/server/record_run.py) and is played in virtual time, by
the product's class over vLLM's scheduler in both.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.sim.arms.ours import ours
from bench.sim.hardware import Gpu, Machine, Model
from bench.sim.lab import Lab
from bench.tests.vllm.replay import Recording, recorded, recording

RUN = Path(__file__).parent / "recorded" / "run.jsonl"
TTL_S = 3.0  # as it was recorded with


@pytest.fixture(scope="module")
def real() -> Recording:
    return recorded(RUN)


def play(real: Recording, path: Path, **options: float) -> Recording:
    """Its arrivals in the lab, on a machine about as fast as the one it was recorded on."""
    start = real.start
    cpu = Gpu("CPU", 0, 1.0, 1e12, 1e9, 1.0, 5e-3, chunk=2048, max_num_seqs=128)
    tiny = Model("tiny", 0.0, 0.2e-3, 0.0, start["block_bytes"] // start["block_size"])
    machine = Machine(
        cpu,
        tiny,
        kv_tokens=start["vram_blocks"] * start["block_size"],
        dram_bytes=start["dram_blocks"] * start["block_bytes"],
        block_size=start["block_size"],
    )
    lab = Lab(
        machine,
        ours(start["policy"], "as recorded", trace_path=str(path), **options),
        real.workload,
    )
    lab.play()
    lab.engine.connector.shutdown()
    return recording(json.loads(line) for line in path.read_text().splitlines())


def test_the_lab_finds_and_decides_what_the_server_found_and_decided(
    real: Recording, tmp_path: Path
) -> None:
    played = play(real, tmp_path / "trace.jsonl", ttl_s=TTL_S)
    assert played.start["vram_blocks"] == real.start["vram_blocks"]
    assert played.start["dram_blocks"] == real.start["dram_blocks"]
    assert played.decided == real.decided
    assert played.pin_ends == real.pin_ends


def test_the_run_is_worth_comparing(real: Recording) -> None:
    """Both tiers are hit, something is computed again, pins end in every way they can."""
    assert len(real.decided) == 20
    assert any(each.vram for each in real.decided.values())
    assert any(each.dram for each in real.decided.values())
    ends = {cause for causes in real.pin_ends.values() for cause in causes}
    assert ends >= {"returned", "expired", "pressure"}


def test_a_lab_that_decides_otherwise_does_not_agree(real: Recording, tmp_path: Path) -> None:
    other = play(real, tmp_path / "trace.jsonl", ttl_s=0.2)
    assert other.pin_ends != real.pin_ends
