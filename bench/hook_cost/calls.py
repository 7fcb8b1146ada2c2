"""How many calls our hooks make: of a step that only decodes, and of a turn's end and begin.

Python and C functions, counted by the interpreter's own profiler. A count is the same however busy
the machine is, so what a change cuts shows where times do not. Run from the repository root:

    python -m bench.hook_cost.calls
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Sequence
from typing import Any

from bench.cli import many, positive, start, teaching_parser
from bench.hook_cost.arms import HOOKS, TimedEngine, build_arms, interleave, progress
from continuum_connector.config import POLICIES

SCHEDULING = ("schedule", "update_from_output", "add_request")


class Count:
    """Calls below some methods of an object; one within another counts once."""

    def __init__(self, target: Any, methods: Sequence[str]) -> None:
        self._profile = cProfile.Profile()
        self._depth = 0
        for method in methods:
            setattr(target, method, self._counted(getattr(target, method)))

    def _counted(self, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            if self._depth == 1:
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
        stats: Any = pstats.Stats(self._profile)
        return int(stats.total_calls)


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
    parser = teaching_parser("python -m bench.hook_cost.calls", __doc__.splitlines()[0])
    parser.add_argument(
        "--policies", nargs="+", default=["fixed_ttl", "adaptive"], choices=POLICIES, metavar="NAME"
    )
    parser.add_argument("--running", type=positive, default=256, help="turns decoding at once")
    parser.add_argument("--waiting", type=many, default=1000, help="turns that wait beside them")
    parser.add_argument("--pins", type=many, default=1000, help="programs pinned at the start")
    parser.add_argument("--programs", type=many, default=10_000, help="programs remembered")
    parser.add_argument("--dram-blocks", type=many, default=100_000, help="blocks in DRAM")
    parser.add_argument("--vram-blocks", type=positive, default=60_000, help="VRAM pool in blocks")
    parser.add_argument("--prompt", type=positive, default=256, help="prompt tokens of each turn")
    parser.add_argument("--output", type=positive, default=256, help="output tokens, at least")
    parser.add_argument("--steps", type=positive, default=200, help="steps of each arm")
    parser.add_argument("--warmup", type=positive, default=60, help="steps before that")
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress lines")
    args = parser.parse_args()
    print("| policy | a decoding step, stock | ours | more | a turn, in our hooks |")
    print("|---|---|---|---|---|")
    for policy in args.policies:
        stock, ours = of_decoding(args, policy)
        turn = of_turns(args, policy)
        more = ours - stock
        print(f"| {policy} | {stock:,.0f} | {ours:,.0f} | {more:.1f} | {turn:,.0f} |", flush=True)


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.calls")
