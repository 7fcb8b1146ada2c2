"""What our hooks add to a step that only decodes, in percent of a stock step.

Stock and ours take the same step one after the other, and the clock is the CPU time of the
scheduler's thread: who else uses the machine, and when, hardly shows. What is timed is the
scheduler's own methods, no hook of ours by itself. Run from the repository root:

    python -m bench.hook_cost.paired
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.cli import many, start, teaching_parser, whole
from bench.common.tables import markdown
from bench.hook_cost.arms import (
    NOTHING,
    OURS,
    STOCK,
    engine_of,
    fill_dram,
    remember_programs,
    run_turns,
    say,
)
from continuum_connector.config import POLICIES
from tests.vllm.harness import Engine

COLUMNS = ("pins", "policy", "stock, us", "ours, us", "paired difference, us", "% of stock")
# Turns that decode at once, programs remembered, blocks of both tiers; tokens of each turn, whose
# `output` is the least: none ends while it is measured; steps before that.
SIZES = {"running": 256, "programs": 10_000, "dram_blocks": 100_000, "vram_blocks": 120_000}
SIZES |= {"prompt": 256, "output": 3000, "warmup": 60}
MOST_STEPS = SIZES["output"] - SIZES["warmup"] - 1


class TimedEngine:
    """One engine under measurement, kept at `running` turns."""

    def __init__(self, name: str, engine: Engine, args: argparse.Namespace) -> None:
        self.name = name
        self.engine = engine
        self.step_us: list[float] = []
        self._args = args
        self._numbers = itertools.count()
        self._clock_parts = 0.0
        for method in ("schedule", "update_from_output", "add_request"):
            self._time(engine.scheduler, method)

    def refill(self) -> None:
        """Replace the turns that ended; every one has a prompt of its own."""
        missing = self._args.running - len(self.engine.scheduler.requests)
        for _ in range(missing):
            number = next(self._numbers)
            self.engine.add(
                f"{self.name}{number}",
                self._args.prompt,
                self._args.output + number % self._args.output,
                seed=number,
                program=f"program{number}",
            )

    def step(self) -> None:
        """One engine step; its scheduler time, arrivals included, is added to the samples."""
        self._clock_parts = 0.0
        self.refill()
        self.engine.step()
        self.step_us.append(self._clock_parts * 1e6)

    def _time(self, target: Any, method: str) -> None:
        original = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._clock_parts += time.thread_time() - began

        setattr(target, method, timed)


def build_pair(args: argparse.Namespace, policy: str, num_pins: int) -> list[TimedEngine]:
    """Stock, then ours with that policy, with one size of pool; ours with pins and a full DRAM.

    NOTHING in place of a policy is a connector that does nothing. Stock runs the turns that ours
    pins, so that as many blocks are in each prefix cache: a step looks into that, and the larger it
    is, the slower.
    """
    common: dict[str, Any] = {
        "num_blocks": args.vram_blocks,
        "max_num_seqs": args.running,
        "max_num_batched_tokens": 8192,
    }
    say(f"building stock, and {policy}: {num_pins} pins, {args.dram_blocks} blocks in DRAM")
    stock = engine_of(STOCK, 0, **common)
    ours = engine_of(policy, args.dram_blocks, **common)
    run_turns(stock, num_pins, args.prompt)
    if policy != NOTHING:
        remember_programs(ours.connector.side, args.programs)
    run_turns(ours, num_pins, args.prompt)  # each is pinned
    if policy != NOTHING:
        fill_dram(ours.connector.side, args.dram_blocks, args.programs)
    for engine in (stock, ours):
        engine.check = lambda: None  # of every block, between the steps: cold caches
    return [TimedEngine(*arm, args) for arm in ((STOCK, stock), (policy, ours))]


def interleave(arms: Sequence[TimedEngine], num_steps: int) -> None:
    """Take `num_steps` steps of each arm, one of each at a time; their samples are those steps'.

    Always in one order: each then finds in the caches what another left there. In alternating
    order the first and the last would follow themselves half of the time, and look cheaper.
    """
    for arm in arms:
        arm.refill()
        arm.step_us.clear()
    gc.collect()
    gc.freeze()  # as EngineCore does once it is built (freeze_gc_heap)
    for _ in range(num_steps):
        for arm in arms:
            arm.step()


def measure(args: argparse.Namespace, policy: str, num_pins: int) -> dict[str, Any]:
    """Microseconds per step, pairwise, with so many pins held by ours.

    Two engines at a time: a third would find the caches as another of ours left them.
    """
    arms = stock, ours = build_pair(args, policy, num_pins)
    say("warming up")
    interleave(arms, args.warmup)
    say(f"measuring {policy}, {num_pins} pins")
    interleave(arms, args.steps)
    return {
        "policy": policy,
        "pins": 0 if policy == NOTHING else len(ours.engine.connector.side.pins),
        "stock_step_us": stock.step_us,
        "step_us": ours.step_us,
    }


def row(result: dict[str, Any]) -> list[object]:
    """Of the table; differences step by step, and between what their median lies."""
    stock, ours = np.array(result["stock_step_us"]), np.array(result["step_us"])
    added = np.sort(ours - stock)
    median, low, high = np.median(added), *interval(added)
    cells = [f"{result['pins']:,}", result["policy"]]
    cells += [f"{np.median(each):.0f}" for each in (stock, ours)]
    for unit in (1, 100 / np.median(stock)):
        cells.append(f"{median * unit:+.1f} ({low * unit:+.1f} to {high * unit:+.1f})")
    return cells


def interval(ordered: Any) -> tuple[float, float]:
    """Between these values the median lies, 95 of 100 times: ranks by the binomial law."""
    half = 0.98 * len(ordered) ** 0.5
    low = max(0, int(len(ordered) / 2 - half))
    return float(ordered[low]), float(ordered[len(ordered) - 1 - low])


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.paired", (__doc__ or "").splitlines()[0])
    add, arms = parser.add_argument, (NOTHING, *OURS)
    known, told = (NOTHING, *POLICIES), f"of {', '.join(arms)}"
    add("--policies", nargs="+", default=arms, choices=known, metavar="NAME", help=told)
    add("--steps", type=whole(1, MOST_STEPS), default=1000, help="steps of each arm and row")
    add("--json", type=Path, help="write all samples here")
    add("--pins", type=many, nargs="+", default=[0, 1000], help="held by ours: a row each")
    args = parser.parse_args(namespace=argparse.Namespace(**SIZES))
    results = [
        measure(args, policy, n)
        for n in args.pins
        for policy in args.policies
        if policy != NOTHING or n == args.pins[0]
    ]
    print(f"{args.running} running turns, {args.steps} pairs of steps, CPU time\n")
    print(markdown(COLUMNS, map(row, results)))
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.paired")
