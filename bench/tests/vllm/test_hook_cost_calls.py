"""bench/hook_cost/calls counts the same each time, whoever else uses the machine."""

from __future__ import annotations

import argparse

import pytest

from bench.hook_cost.arms import build_pair
from bench.hook_cost.calls import LAYERS, WORKERS, Count, of_decoding, of_turns, of_worker
from tests.vllm import kv_caches

SMALL = argparse.Namespace(
    running=8,
    waiting=4,
    pins=8,
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


class Two:
    def outer(self) -> str:
        return self.inner().upper()

    def inner(self) -> str:
        return "a"


def test_a_call_within_a_call_counts_once() -> None:
    two = Two()
    count = Count(two, ("outer", "inner"))
    assert two.outer() == "A"
    alone = count.total
    assert two.outer() == "A"
    assert count.total == 2 * alone > 0


@pytest.mark.parametrize("policy", ["fixed_ttl", "stock"])
def test_a_decoding_step_costs_ours_a_few_calls_more_and_a_turn_some_hundred(policy: str) -> None:
    stock, ours = of_decoding(SMALL, policy)
    assert 0 < ours - stock < 120
    assert 200 < of_turns(SMALL, policy) < 4000


def test_every_block_in_the_full_dram_is_ranked_when_room_is_made() -> None:
    args = argparse.Namespace(
        **vars(SMALL) | {"pins": 80, "prompt": 512, "programs": 100, "dram_blocks": 4000}
    )
    args.vram_blocks = 8000
    index = build_pair(args, "adaptive", args.pins)[1].engine.connector.side.tier.index
    live = [number for chain in index.next_to_leave(None) for number in chain.tickets.tolist()]
    assert len(set(live)) == index.num_ready == args.dram_blocks


@pytest.mark.skipif(not kv_caches.LAYOUTS, reason="vLLM <= 0.28")
def test_a_worker_without_orders_is_counted_hook_by_hook() -> None:
    counted = of_worker(WORKERS["a tier"], 4)
    assert counted.numbers["step"]["our_calls"] < 4 * len(LAYERS), "none for a layer"
    called = {name.rpartition(".")[2]: num for name, (num, _) in counted.functions.items()}
    assert called["wait_for_save"] == called["build_connector_worker_meta"] == 4
