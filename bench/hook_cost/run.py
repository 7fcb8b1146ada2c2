"""What our hooks cost: time per scheduler step and per worker step, beside a stock scheduler.

All schedulers run the same turns in the same process, in alternating steps: vLLM's real
Scheduler, block pool and requests around a model that takes no time. One is stock, the others
are ours, one per policy, and hold pins and a full DRAM index meanwhile. Run from the
repository root:

    python -m bench.hook_cost.run
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.cli import many, positive, start, teaching_parser
from bench.hook_cost.arms import HOOKS, TimedEngine, build_arms, interleave, progress
from bench.hook_cost.worker_step import measure_worker
from continuum_connector.config import POLICIES


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both halves; returns the numbers of the table."""
    say = progress(args)
    stock, *ours = build_arms(args, args.policies, args.pins, say)
    for arm in ours:
        arm.time_hooks(HOOKS)
    say("warming up")
    interleave([stock, *ours], args.warmup)
    say("measuring steps")
    interleave([stock, *ours], args.steps)
    result = {
        "running": args.running,
        "stock_step_us": stock.step_us,
        "ours": {arm.name: samples(arm) for arm in ours},
    }
    say("measuring worker steps")
    result["worker"] = measure_worker(args.steps)
    return result


def samples(arm: TimedEngine) -> dict[str, Any]:
    """What one of our arms measured, and what it held in the end."""
    side = arm.engine.connector.side
    return {
        "pins": len(side.pins),
        "dram_blocks": side.tier.index.num_ready,
        "step_us": arm.step_us,
        "hook_us": arm.hook_us,
    }


def table(result: dict[str, Any]) -> str:
    """The numbers as text, medians first."""

    def row(name: str, values: list[float]) -> str:
        p50, p99 = np.percentile(values, [50, 99])
        return f"| {name} | {p50:.1f} | {p99:.1f} | {max(values):.1f} |"

    stock = result["stock_step_us"]
    lines = [
        f"{result['running']} running turns, {len(stock)} steps of each, alternating",
        *(
            f"{name}: {ours['pins']} pinned programs, {ours['dram_blocks']} DRAM blocks"
            for name, ours in result["ours"].items()
        ),
        "",
        "| us per step | median | p99 | max |",
        "|---|---|---|---|",
        row("scheduler step, stock", stock),
    ]
    for name, ours in result["ours"].items():
        added = [b - a for a, b in zip(stock, ours["step_us"], strict=True)]
        lines += [
            row(f"scheduler step, {name}", ours["step_us"]),
            row(f"difference, {name}", added),
            row(f"inside our hooks, {name}", ours["hook_us"]),
        ]
    lines += [row(f"worker step, {name}", values) for name, values in result["worker"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.run", __doc__.splitlines()[0])
    parser.add_argument(
        "--policies", nargs="+", default=["fixed_ttl", "adaptive"], choices=POLICIES, metavar="NAME"
    )
    parser.add_argument("--running", type=positive, default=256, help="turns decoding at once")
    parser.add_argument("--pins", type=many, default=1000, help="programs pinned meanwhile")
    parser.add_argument("--programs", type=many, default=10_000, help="programs remembered")
    parser.add_argument("--dram-blocks", type=many, default=100_000, help="blocks in DRAM")
    parser.add_argument("--vram-blocks", type=positive, default=60_000, help="VRAM pool in blocks")
    parser.add_argument("--prompt", type=positive, default=256, help="prompt tokens of each turn")
    parser.add_argument("--output", type=positive, default=128, help="output tokens, at least")
    parser.add_argument("--steps", type=positive, default=1000, help="steps measured of each arm")
    parser.add_argument("--warmup", type=positive, default=200, help="steps before that")
    parser.add_argument("--json", type=Path, help="write all samples here")
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress lines")
    args = parser.parse_args()
    result = run(args)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.run")
