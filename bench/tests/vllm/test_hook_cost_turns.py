"""What bench/hook_cost/turns measures: a turn does not cost us more if its context is longer."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.hook_cost.arms import RIVALS
from bench.hook_cost.turns import STOCK, InProcess, Measured, _row

SMALL = {"running": 8, "programs": 20, "steps": 16, "warmup": 4, "progress": False}


def measure(name: str, context: int) -> dict[str, Any]:
    arm = Measured(name, argparse.Namespace(context=context, **SMALL))
    return arm.result(arm.times(SMALL["steps"]))


def of(name: str, context: int) -> dict[str, float]:
    result = measure(name, context)
    return {part: counts["our_codes"] for part, counts in result["counts"].items()}


@pytest.mark.parametrize("policy", ["fixed_ttl", "adaptive"])
def test_no_bytecode_of_ours_runs_per_block_of_a_turn_that_goes_on(policy: str) -> None:
    """4,096 tokens more are 256 blocks more."""
    short, long = of(policy, 2048), of(policy, 6144)
    assert sum(long.values()) - sum(short.values()) < 256
    assert long["before"] < 8000  # what is done before the GPU gets its step


@pytest.mark.parametrize("name", [STOCK, "nothing", *RIVALS])
def test_every_arm_ends_a_turn_and_begins_one_per_step(name: str) -> None:
    result = measure(name, 512)
    assert len(result["us"]["before"]) == SMALL["steps"]
    assert result["counts"]["before"]["our_calls"] == 0
    assert "| 512 |" in _row(result, result)


def test_an_arm_in_a_process_of_its_own_takes_the_steps_that_it_is_told_to() -> None:
    arm = InProcess(STOCK, 512, argparse.Namespace(**SMALL))
    for num in (3, 1):
        arm.step(num)
    result = arm.result()
    assert (result["arm"], len(result["us"]["after"])) == (STOCK, 4)
