"""bench/sim as a whole: runs repeat exactly, and tell what is known to be true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.common.plans import ProgramPlan, Span, TurnPlan, Workload
from bench.sim.arms import ARMS
from bench.sim.hardware import machine
from bench.sim.job import RunRecord
from bench.sim.lab import Lab, StuckError
from bench.sim.workloads.made_up import eight_turns
from bench.tests.vllm.lab import mean_jct_s, play, small_machine, small_workload

ROOT = Path(__file__).resolve().parents[3]
AGAIN = """
import pathlib, sys, msgspec
from bench.tests.vllm.lab import play, small_machine, small_workload
record = play(sys.argv[1], small_workload(), small_machine())
plain = msgspec.json.encode(msgspec.structs.replace(record, wall_s=0.0))
pathlib.Path(sys.argv[2]).write_bytes(plain)
"""


def without_wall(record: RunRecord) -> RunRecord:
    return msgspec.structs.replace(record, wall_s=0.0)


def test_a_run_repeats_exactly_in_another_process(tmp_path: Path) -> None:
    """With another seed of Python's string hashes, which order sets."""
    here = without_wall(play("adaptive", small_workload(), small_machine()))
    environ = os.environ | {"PYTHONHASHSEED": "4711"}
    written = tmp_path / "record.json"
    subprocess.run(
        [sys.executable, "-c", AGAIN, "adaptive", str(written)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert msgspec.json.decode(written.read_bytes(), type=RunRecord) == here


def test_program_order_is_what_the_published_overload_lacks() -> None:
    """Measured on one H100 at six programs per second: 244 s with stock vLLM."""
    stock, ordered = (
        mean_jct_s(play(arm, eight_turns(6), machine("H100"))) for arm in ("stock", "stock+order")
    )
    assert 220 < stock < 270
    assert ordered < 0.5 * stock


def test_one_program_alone_takes_what_its_tokens_take() -> None:
    """No queue, nothing evicted: each turn computes what the last one has not, 8192 at most."""
    workload = small_workload(1)
    record = play("stock", workload, machine("H100"))
    block = 64
    for before, after in zip(record.turns, record.turns[1:], strict=False):
        known = (before.num_prompt + 20 - 1) // block * block  # the last token is never computed
        assert after.num_local == min(known, (after.num_prompt - 1) // block * block)
        assert after.arrived == pytest.approx(before.finished + 0.5)
    assert record.num_computed_tokens >= record.num_prompt_tokens - record.num_local_tokens
    took_s = record.turns[-1].finished - record.turns[0].arrived
    assert list(record.jct_s.values()) == [pytest.approx(took_s)]


def test_what_dram_brings_need_not_be_computed() -> None:
    stock, simple = (play(arm, small_workload(), small_machine()) for arm in ("stock", "simple"))
    assert stock.num_external_tokens == stock.loaded_bytes == 0
    assert simple.num_external_tokens > 0
    assert simple.loaded_bytes == pytest.approx(simple.num_external_tokens * 131_072)
    assert simple.num_computed_tokens < stock.num_computed_tokens


def test_infinite_memory_computes_everything_once() -> None:
    record = play("infinite", small_workload(), small_machine())
    assert record.num_preemptions == 0
    once = 13_193 + 20  # of each program's text, by its last turn
    blocks = 8 * 64  # what each turn's last, partial block is computed again for
    assert record.num_computed_tokens <= len(record.jct_s) * (once + blocks)


def test_block_size_changes_little() -> None:
    """The lab's blocks of 64 tokens against vLLM's 16."""
    one, four = (
        mean_jct_s(play("stock", small_workload(), machine("A100-40", block_size=size)))
        for size in (16, 64)
    )
    assert one == pytest.approx(four, rel=0.02)


# --- plans ------------------------------------------------------------------------------
def turn(stream: int, gap_s: float = 0.0, joins: tuple[str, ...] = ()) -> TurnPlan:
    return TurnPlan((Span(stream, 300),), Span(stream, 10, start=300), gap_s, "tool", joins=joins)


FAMILY = Workload(
    "family",
    (
        ProgramPlan("parent", (turn(1), turn(2, gap_s=0.25, joins=("child",)))),
        ProgramPlan("child", (turn(3), turn(4, gap_s=2.0)), 1.0, ("parent", 0), "parent"),
    ),
)


def test_a_child_begins_after_its_parents_turn_and_the_parent_waits_for_those_it_joins() -> None:
    record = play("stock", FAMILY, machine("H100"))
    at = {(each.program, each.index): each for each in record.turns}
    assert at["child", 0].arrived == pytest.approx(at["parent", 0].finished + 1.0)
    assert at["child", 1].arrived == pytest.approx(at["child", 0].finished + 2.0)
    assert at["parent", 1].arrived == pytest.approx(at["child", 1].finished + 0.25)


def test_a_turn_that_never_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of VRAM and a prompt of five: vLLM lets it wait for ever."""
    monkeypatch.setattr("bench.sim.lab.STUCK_S", 5.0)
    workload = Workload("too long", (ProgramPlan("giant", (turn(1),)),))
    with pytest.raises(StuckError, match="giant/0"):
        Lab(machine("H100", kv_tokens=256), ARMS["stock"], workload).play()
