"""What the tests of bench/sim share: a server that is too small, and programs that overflow it."""

from __future__ import annotations

from bench.common.plans import Workload
from bench.sim.arms import ARMS
from bench.sim.hardware import Machine, machine
from bench.sim.job import RunRecord
from bench.sim.lab import Lab
from bench.sim.workloads.made_up import eight_turns

PATIENCE_S = 60.0  # of virtual time, for copies under way and pins that nobody comes back to


def small_machine(disk_gb: float = 0.0) -> Machine:
    """VRAM for four programs' last turns, DRAM for as many again."""
    return machine("A100-40", kv_tokens=60_000, dram_gb=8, disk_gb=disk_gb)


def small_workload(num_programs: int = 10) -> Workload:
    """The first programs of the published workload at two per second."""
    whole = eight_turns(2)
    return Workload(whole.name, whole.programs[:num_programs])


def play(arm: str, workload: Workload, on: Machine) -> RunRecord:
    return Lab(on, ARMS[arm], workload).play()


def mean_jct_s(record: RunRecord) -> float:
    return sum(record.jct_s.values()) / len(record.jct_s)


def assert_lets_go(lab: Lab) -> None:
    """Step an engine without turns until nothing is under way, as EngineCore's loop would: then
    every block is free."""
    until = lab.clock.now + PATIENCE_S
    while lab.clock.now < until:
        wake = min(lab.engine.worker.next_done(), lab.clock.now + 1.0)
        assert not list(lab.engine.step(lambda wake=wake: wake))
    pool = lab.engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
