"""What bench/hook_cost/paired measures are steps that only decode."""

from __future__ import annotations

import argparse

from bench.hook_cost.paired import measure, row
from bench.tests.vllm.test_hook_cost_calls import SMALL


def test_copies_are_under_way_all_the_time() -> None:
    args = argparse.Namespace(**vars(SMALL) | {"copies": 4, "output": 60, "steps": 20, "warmup": 2})
    result = measure(args, "adaptive", num_pins=8)
    assert (len(result["step_us"]), result["pins"]) == (20, 12)
    assert result["copies"] > 0
    assert f"| 12 | {result['copies']} | adaptive |" in row(result)
