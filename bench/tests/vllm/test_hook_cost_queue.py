"""What bench/hook_cost/queue measures are steps in which turns end."""

from __future__ import annotations

import argparse

from bench.hook_cost.queue import measure, row
from bench.tests.vllm.test_hook_cost_calls import SMALL


def test_turns_end_while_the_first_row_is_measured() -> None:
    args = argparse.Namespace(
        **vars(SMALL) | {"waiting": [4, 8], "running": 16, "steps": 12, "warmup": 2}
    )
    first, second = measure(args, "distinct", "adaptive")
    for result in (first, second):
        assert result["turns_per_step"] > 0
        assert f"| {result['turns_per_step']:.2f} |" in row(result)
