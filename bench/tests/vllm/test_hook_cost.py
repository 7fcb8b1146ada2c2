"""What bench/hook_cost measures: steps that only decode, turns that go on."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.hook_cost.arms import RIVALS
from bench.hook_cost.paired import build_pair, interleave, measure, row
from bench.hook_cost.turns import STOCK, Counted, Measured, in_process
from bench.hook_cost.turns import row as turns_row

# --- paired: steps that only decode ----------------------------------------------------------
SMALL = argparse.Namespace(
    running=8,
    programs=20,
    dram_blocks=200,
    vram_blocks=2000,
    prompt=64,
    output=16,
    steps=40,
    warmup=4,
)


def test_each_step_is_taken_by_both_and_pins_are_held_meanwhile() -> None:
    args = argparse.Namespace(**vars(SMALL) | {"output": 60, "steps": 20, "warmup": 2})
    result = measure(args, "adaptive", num_pins=8)
    assert [len(result[key]) for key in ("stock_step_us", "step_us")] == [20, 20]
    assert row(result)[:2] == ["8", "adaptive"]


def test_every_block_in_the_full_dram_is_ranked_when_room_is_made() -> None:
    args = argparse.Namespace(
        **vars(SMALL) | {"prompt": 512, "programs": 100, "dram_blocks": 4000, "vram_blocks": 8000}
    )
    index = build_pair(args, "adaptive", 80)[1].engine.connector.side.tier.index
    live = [number for chain in index.next_to_leave(None) for number in chain.tickets.tolist()]
    assert len(set(live)) == index.num_ready == args.dram_blocks


def test_a_step_that_only_decodes_costs_ours_a_few_calls() -> None:
    args = argparse.Namespace(**vars(SMALL) | {"output": 100})
    arms, counted = build_pair(args, "fixed_ttl", 8), Counted()
    interleave(arms, args.warmup)
    for _ in range(args.steps):
        with counted("step"):
            arms[1].step()
    assert 0 < counted.numbers["step"]["our_calls"] / args.steps < 120


# --- turns: none costs us more if its context is longer --------------------------------------
TURNS = {"running": 8, "programs": 20, "steps": 16, "warmup": 4}


def result_of(name: str, context: int, **more: int) -> dict[str, Any]:
    arm = Measured(name, argparse.Namespace(context=context, **TURNS | more))
    arm.step(TURNS["steps"])
    return arm.result()


def codes_of(name: str, context: int, **more: int) -> dict[str, float]:
    result = result_of(name, context, **more)
    return {part: counts["our_codes"] for part, counts in result["counts"].items()}


@pytest.mark.parametrize("policy", ["fixed_ttl", "adaptive"])
def test_no_bytecode_of_ours_runs_per_block_or_per_turn_that_runs(policy: str) -> None:
    """4,096 tokens more are 256 blocks more."""
    short, long = codes_of(policy, 2048), codes_of(policy, 6144)
    assert sum(long.values()) - sum(short.values()) < 256
    assert long["before"] < 8000  # what is done before the GPU gets its step
    assert codes_of(policy, 2048, running=72)["before"] - short["before"] < 64


@pytest.mark.parametrize("name", [STOCK, "nothing", *RIVALS])
def test_every_arm_ends_a_turn_and_begins_one_per_step(name: str) -> None:
    result = result_of(name, 512)
    assert len(result["us"]["before"]) == TURNS["steps"]
    assert result["counts"]["before"]["our_calls"] == 0
    assert turns_row(result, result)[:2] == ["512", name]


def test_an_arm_in_a_process_of_its_own_takes_the_steps_that_it_is_told_to() -> None:
    with in_process(STOCK, argparse.Namespace(context=512, **TURNS)) as arm:
        for num in (3, 1):
            arm.step(num)
        result = arm.result()
    assert (result["arm"], len(result["us"]["after"])) == (STOCK, 4)
