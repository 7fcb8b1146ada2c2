"""What bench/hook_cost/paired measures are steps that only decode."""

from __future__ import annotations

import argparse

from bench.hook_cost.paired import build_pair, interleave, measure, row
from bench.hook_cost.turns import Counted

SMALL = argparse.Namespace(
    running=8,
    copies=0,
    programs=20,
    dram_blocks=200,
    vram_blocks=2000,
    prompt=64,
    output=16,
    steps=40,
    warmup=4,
    progress=False,
)


def test_copies_are_under_way_all_the_time() -> None:
    args = argparse.Namespace(**vars(SMALL) | {"copies": 4, "output": 60, "steps": 20, "warmup": 2})
    result = measure(args, "adaptive", num_pins=8)
    assert (len(result["step_us"]), result["pins"]) == (20, 12)
    assert result["copies"] > 0
    assert f"| 12 | {result['copies']} | adaptive |" in row(result)


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
