"""What our hooks add to a step that only decodes, in percent of a stock step.

Stock and ours take the same step one after the other, and the clock is the CPU time of the
scheduler's thread: who else uses the machine, and when, hardly shows. What is timed is the
scheduler's own methods, no hook of ours by itself. With `--copies`, the stores of so many turns are
under way all the time, as many of them as a step's window takes. Run from the repository root:

    python -m bench.hook_cost.paired
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from bench.cli import many, start
from bench.hook_cost.arms import NOTHING, build_pair, interleave, options, progress


def measure(args: argparse.Namespace, policy: str, num_pins: int) -> dict[str, Any]:
    """Microseconds per step, pairwise, with so many pins held by ours.

    Two engines at a time: a third would find the caches as another of ours left them.
    """
    say = progress(args)
    arms = stock, ours = build_pair(args, policy, num_pins, time.thread_time)
    say("warming up")
    interleave(arms, args.warmup)
    say(f"measuring {policy}, {num_pins} pins")
    interleave(arms, args.steps)
    return {
        "policy": policy,
        "pins": 0 if policy == NOTHING else len(ours.engine.connector.side.pins),
        "copies": len(ours.engine.worker.pending),
        "stock_step_us": stock.step_us,
        "step_us": ours.step_us,
    }


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    stock, ours = np.array(result["stock_step_us"]), np.array(result["step_us"])
    added = np.sort(ours - stock)
    median, low, high = np.median(added), *interval(added)
    of_stock = 100 / np.median(stock)
    return (
        f"| {result['pins']:,} | {result['copies']} | {result['policy']} | {np.median(stock):.0f} "
        f"| {np.median(ours):.0f} | {median:+.1f} ({low:+.1f} to {high:+.1f}) "
        f"| {median * of_stock:+.1f} ({low * of_stock:+.1f} to {high * of_stock:+.1f}) |"
    )


def interval(ordered: Any) -> tuple[float, float]:
    """Between these values the median lies, 95 of 100 times: ranks by the binomial law."""
    half = 0.98 * len(ordered) ** 0.5
    low = max(0, int(len(ordered) / 2 - half))
    return float(ordered[low]), float(ordered[len(ordered) - 1 - low])


def main() -> None:
    sizes = {"vram_blocks": 120_000, "output": 3000, "steps": 1000}
    parser = options("paired", __doc__, (NOTHING,), **sizes)
    parser.add_argument(
        "--pins", type=many, nargs="+", default=[0, 1000], help="held by ours: a row each"
    )
    args = parser.parse_args()
    if args.warmup + args.steps >= args.output:
        parser.error(f"--output {args.output}: turns would end while they are measured; more")
    results = [
        measure(args, policy, n)
        for n in args.pins
        for policy in args.policies
        if policy != NOTHING or n == args.pins[0]
    ]
    print(f"{args.running} running turns, {args.steps} pairs of steps, CPU time\n")
    print("| pins | copies | policy | stock, us | ours, us | paired difference, us | % of stock |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(row(result) for result in results))
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.paired")
