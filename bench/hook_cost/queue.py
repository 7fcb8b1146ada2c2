"""What a step costs while thousands of turns wait, beside a stock scheduler with the same queue.

Turns end and are replaced in nearly every step, so that the queue moves, pins begin, and DRAM,
which is full, makes room. Either every waiting turn is a program of its own, or all are turns of
one. vLLM's own connectors, and one that does nothing, run in the place of ours as well. Clock and
order of steps as in paired.py. Run from the repository root:

    python -m bench.hook_cost.queue
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.cli import many, start
from bench.hook_cost.arms import NOTHING, build_arms, interleave, options, progress
from bench.hook_cost.rivals import RIVALS

PROGRAMS = {"distinct": "program{}".format, "one": lambda number: "one"}


def measure(args: argparse.Namespace, kind: str, policy: str) -> Iterator[dict[str, Any]]:
    """Microseconds per step of stock and of ours, for each length of the queue."""
    say = progress(args)
    arms = stock, ours = build_arms(args, [policy], args.pins, say, time.thread_time)
    num_more = args.output  # the first turns end then
    for num_waiting in args.waiting:
        for arm in arms:
            arm.program_of = PROGRAMS[kind]
            arm.num_turns = args.running + num_waiting
        say(f"warming up: {policy}, programs {kind}, {num_waiting} waiting turns")
        interleave(arms, args.warmup + num_more)
        say("measuring")
        num_more, num_before = 0, len(ours.engine.finish_reasons)
        interleave(arms, args.steps)
        side = getattr(ours.engine.connector, "side", None)
        yield {
            "waiting": num_waiting,
            "programs": kind,
            "policy": policy,
            "pins": 0 if side is None else len(side.pins),
            "turns_per_step": (len(ours.engine.finish_reasons) - num_before) / args.steps,
            "stock_step_us": list(stock.step_us),
            "step_us": list(ours.step_us),
        }


def row(result: dict[str, Any]) -> str:
    """One line of the table. What few steps do shows in the mean alone."""
    line = f"| {result['waiting']:,} | {result['programs']} | {result['policy']} "
    line += f"| {result['turns_per_step']:.2f} "
    for average in (np.median, np.mean):
        stock, ours = average(result["stock_step_us"]), average(result["step_us"])
        line += f"| {stock:.0f} | {ours:.0f} | {ours / stock:.2f} "
    return line + "|"


def main() -> None:
    parser = options("queue", __doc__, (NOTHING, *RIVALS), warmup=100)
    parser.add_argument(
        "--waiting", type=many, nargs="+", default=[0, 1000, 8000, 30_000], help="waiting turns"
    )
    parser.add_argument("--kinds", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--pins", type=many, default=1000, help="programs pinned at the start")
    args = parser.parse_args()
    print(
        f"{args.running} running turns, {args.steps} steps of each, CPU time; "
        f"{args.dram_blocks:,} DRAM blocks, {args.programs:,} programs remembered\n"
    )
    columns = ["waiting", "programs", "policy", "turns a step"]
    columns += ["stock, median us", "ours", "ratio", "stock, mean us", "ours", "ratio"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    results = []
    for kind, policy in itertools.product(args.kinds, args.policies):
        for result in measure(args, kind, policy):
            print(row(result), flush=True)
            results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.queue")
