"""How many calls our hooks make: of a step that only decodes, and of a turn's end and begin.

Python and C functions, counted by the interpreter's own profiler. A count is the same however busy
the machine is, so what a change cuts shows where times do not. Run from the repository root:

    python -m bench.hook_cost.calls
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from collections.abc import Sequence
from typing import Any

from bench.cli import many, start
from bench.hook_cost.arms import TimedEngine, build_arms, interleave, options, progress

HOOKS = (
    "before_queued",
    "on_new_request",
    "rank",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)

SCHEDULING = ("schedule", "update_from_output", "add_request")


class Count:
    """Calls below some methods of an object; one within another counts once."""

    def __init__(self, target: Any, methods: Sequence[str]) -> None:
        self._profile = cProfile.Profile()
        self._depth = 0
        self._num_counted = 0
        for method in methods:
            setattr(target, method, self._counted(getattr(target, method)))

    def _counted(self, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            if self._depth == 1:
                self._num_counted += 1
                self._profile.enable()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._profile.disable()

        return counted

    @property
    def total(self) -> int:
        """Without those that switch the profiler off."""
        stats: Any = pstats.Stats(self._profile)
        return int(stats.total_calls) - self._num_counted


def of_decoding(args: argparse.Namespace, policy: str) -> list[float]:
    """Calls of a step that only decodes: of stock, of ours."""
    args = argparse.Namespace(**vars(args) | {"output": 3000, "vram_blocks": 120_000})
    arms = build_arms(args, [policy], args.pins, progress(args))
    interleave(arms, args.warmup)
    counts = [Count(arm.engine.scheduler, SCHEDULING) for arm in arms]
    interleave(arms, args.steps)
    return [count.total / args.steps for count in counts]


def of_turns(args: argparse.Namespace, policy: str) -> float:
    """Calls below our hooks, per turn that ends while others wait and DRAM is full."""
    ours: TimedEngine = build_arms(args, [policy], args.pins, progress(args))[1]
    ours.num_turns += args.waiting
    interleave([ours], args.warmup + args.output)  # the first turns end then
    finished = ours.engine.finish_reasons
    num_before = len(finished)
    count = Count(ours.engine.connector, HOOKS)
    interleave([ours], args.steps)
    return count.total / (len(finished) - num_before)


def main() -> None:
    parser = options("calls", __doc__, steps=200)
    parser.add_argument("--waiting", type=many, default=1000, help="turns that wait beside them")
    parser.add_argument("--pins", type=many, default=1000, help="programs pinned at the start")
    args = parser.parse_args()
    print("| policy | a decoding step, stock | ours | more | a turn, in our hooks |")
    print("|---|---|---|---|---|")
    found = []
    for policy in args.policies:
        stock, ours = of_decoding(args, policy)
        turn = of_turns(args, policy)
        more = ours - stock
        found.append({"policy": policy, "stock": stock, "ours": ours, "turn": turn})
        print(f"| {policy} | {stock:,.0f} | {ours:,.0f} | {more:.1f} | {turn:,.0f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.calls")
