"""What a step costs while thousands of turns wait, beside a stock scheduler with the same queue.

Turns end and are replaced in nearly every step, so that the queue moves, pins begin, and DRAM,
which is full, makes room. Either every waiting turn is a program of its own, or all are turns of
one. Clock and order of steps as in paired.py. Run from the repository root:

    python -m bench.hook_cost.queue
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.cli import many, positive, start, teaching_parser
from bench.hook_cost.arms import NOTHING, build_arms, interleave, progress
from continuum_connector.config import POLICIES

PROGRAMS = {"distinct": "program{}".format, "one": lambda number: "one"}


def measure(args: argparse.Namespace, kind: str, policy: str) -> Iterator[dict[str, Any]]:
    """Microseconds per step of stock and of ours, for each length of the queue."""
    say = progress(args)
    arms = stock, ours = build_arms(args, [policy], args.pins, say, time.thread_time)
    for num_waiting in args.waiting:
        for arm in arms:
            arm.program_of = PROGRAMS[kind]
            arm.num_turns = args.running + num_waiting
        say(f"warming up: {policy}, programs {kind}, {num_waiting} waiting turns")
        interleave(arms, args.warmup)
        say("measuring")
        interleave(arms, args.steps)
        yield {
            "waiting": num_waiting,
            "programs": kind,
            "policy": policy,
            "pins": 0 if policy == NOTHING else len(ours.engine.connector.side.pins),
            "stock_step_us": list(stock.step_us),
            "step_us": list(ours.step_us),
        }


def row(result: dict[str, Any]) -> str:
    """One line of the table. What few steps do shows in the mean alone."""
    line = f"| {result['waiting']:,} | {result['programs']} | {result['policy']} "
    for average in (np.median, np.mean):
        stock, ours = average(result["stock_step_us"]), average(result["step_us"])
        line += f"| {stock:.0f} | {ours:.0f} | {ours / stock:.2f} "
    return line + "|"


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.queue", __doc__.splitlines()[0])
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[NOTHING, "fixed_ttl", "adaptive"],
        choices=[NOTHING, *POLICIES],
        metavar="NAME",
    )
    parser.add_argument(
        "--waiting", type=many, nargs="+", default=[0, 1000, 8000, 30_000], help="waiting turns"
    )
    parser.add_argument("--kinds", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--running", type=positive, default=256, help="turns decoding at once")
    parser.add_argument("--pins", type=many, default=1000, help="programs pinned at the start")
    parser.add_argument("--programs", type=many, default=10_000, help="programs remembered")
    parser.add_argument("--dram-blocks", type=many, default=100_000, help="blocks in DRAM")
    parser.add_argument("--vram-blocks", type=positive, default=60_000, help="VRAM pool in blocks")
    parser.add_argument("--prompt", type=positive, default=256, help="prompt tokens of each turn")
    parser.add_argument("--output", type=positive, default=256, help="output tokens, at least")
    parser.add_argument("--steps", type=positive, default=300, help="steps of each arm and row")
    parser.add_argument("--warmup", type=positive, default=100, help="steps before that")
    parser.add_argument("--json", type=Path, help="write all samples here")
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress lines")
    args = parser.parse_args()
    print(
        f"{args.running} running turns, {args.steps} steps of each, CPU time; "
        f"{args.dram_blocks:,} DRAM blocks, {args.programs:,} programs remembered\n"
    )
    columns = ["waiting", "programs", "policy"]
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
