"""What bench/hook_cost/queue measures are steps in which turns end."""

from __future__ import annotations

import argparse

import pytest

from bench.hook_cost.arms import build_arms
from bench.hook_cost.queue import measure, row
from bench.hook_cost.rivals import RIVALS
from bench.tests.vllm.test_hook_cost_calls import SMALL


def test_turns_end_while_the_first_row_is_measured() -> None:
    args = argparse.Namespace(
        **vars(SMALL) | {"waiting": [4, 8], "running": 16, "steps": 12, "warmup": 2}
    )
    first, second = measure(args, "distinct", "adaptive")
    for result in (first, second):
        assert result["turns_per_step"] > 0
        assert f"| {result['turns_per_step']:.2f} |" in row(result)


@pytest.mark.parametrize("policy", RIVALS)
def test_vllms_own_connectors_run_with_a_full_dram(policy: str) -> None:
    """It is asserted where they are built: what has room in DRAM makes none."""
    args = argparse.Namespace(**vars(SMALL) | {"waiting": [4], "running": 16, "steps": 40})
    (result,) = measure(args, "distinct", policy)
    assert result["turns_per_step"] > 0 == result["pins"]


def test_every_block_in_the_full_dram_is_ranked_when_room_is_made() -> None:
    args = argparse.Namespace(
        **vars(SMALL) | {"pins": 80, "prompt": 512, "programs": 100, "dram_blocks": 4000}
    )
    args.vram_blocks = 8000
    index = build_arms(args, ["adaptive"], args.pins, print)[1].engine.connector.side.tier.index
    live = [number for chain in index.next_to_leave(None) for number in chain.tickets.tolist()]
    assert len(set(live)) == index.num_ready == args.dram_blocks
