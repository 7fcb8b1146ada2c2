"""What bench/hook_cost/turns measures: a turn does not cost us more if its context is longer."""

from __future__ import annotations

import argparse

import pytest

from bench.hook_cost.rivals import RIVALS
from bench.hook_cost.turns import STOCK, _row, measure

SMALL = {"running": 8, "programs": 20, "steps": 16, "warmup": 4, "progress": False}


def of(name: str, context: int) -> dict[str, float]:
    result = measure(name, argparse.Namespace(context=context, **SMALL))
    return {part: counts["our_codes"] for part, counts in result["counts"].items()}


@pytest.mark.parametrize("policy", ["fixed_ttl", "adaptive"])
def test_no_bytecode_of_ours_runs_per_block_of_a_turn_that_goes_on(policy: str) -> None:
    """4,096 tokens more are 256 blocks more."""
    short, long = of(policy, 2048), of(policy, 6144)
    assert sum(long.values()) - sum(short.values()) < 256
    assert long["before"] < 8000  # what is done before the GPU gets its step


@pytest.mark.parametrize("name", [STOCK, "nothing", *RIVALS])
def test_every_arm_ends_a_turn_and_begins_one_per_step(name: str) -> None:
    result = measure(name, argparse.Namespace(context=512, **SMALL))
    assert len(result["us"]["before"]) == SMALL["steps"]
    assert result["counts"]["before"]["our_calls"] == 0
    assert "| 512 |" in _row(result, result)
