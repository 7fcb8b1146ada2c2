"""What our hooks cost: time per scheduler step and per worker step, beside a stock scheduler.

All schedulers run the same turns in the same process, in alternating steps: vLLM's real
Scheduler, block pool and requests around a model that takes no time. One is stock, the others
are ours, one per policy, and hold pins and a full DRAM index meanwhile. Run from the
repository root:

    python -m bench.hook_cost.run
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.hook_cost.population import fill_dram, pin_programs
from bench.hook_cost.worker_step import measure_worker
from tests.vllm.harness import Engine
from tests.vllm.tiering import SLOT_BYTES

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


# Seconds; dear enough for `adaptive` to pin every turn for as long as it may.
KNOWN_COSTS = {"prefill": [0.01, 1e-3, 0.0, 0.0, 0.0], "load": [0.01, 1e-3]}


class Arm:
    """One engine under measurement, kept at `num_running` decoding turns."""

    def __init__(self, name: str, engine: Engine, args: argparse.Namespace) -> None:
        self.name = name
        self.engine = engine
        self.step_us: list[float] = []
        self.hook_us: list[float] = []
        self._args = args
        self._numbers = itertools.count()
        self._inside = 0.0
        self._depth = 0
        self._clock_parts = 0.0
        for method in ("schedule", "update_from_output", "add_request"):
            self._time(engine.scheduler, method)
        if engine.connector is not None:
            for hook in HOOKS:
                self._time_hook(engine.connector, hook)

    def refill(self) -> None:
        """Replace the turns that ended; every one is the first turn of a new program."""
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
        self._clock_parts = self._inside = 0.0
        self.refill()
        self.engine.step()
        self.step_us.append(self._clock_parts * 1e6)
        self.hook_us.append(self._inside * 1e6)

    def _time(self, target: Any, method: str) -> None:
        original = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._clock_parts += time.perf_counter() - began

        setattr(target, method, timed)

    def _time_hook(self, target: Any, method: str) -> None:
        original = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # a hook inside a hook is counted once
                    self._inside += time.perf_counter() - began

        setattr(target, method, timed)


def build_arms(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[Arm, list[Arm]]:
    """Stock and ours, one per policy, with the same pool; ours with pins and a full DRAM index."""
    common: dict[str, Any] = {
        "num_blocks": args.vram_blocks,
        "max_num_seqs": args.running,
        "max_num_batched_tokens": 8192,
    }
    say("building the stock engine")
    stock = Arm("stock", Engine(connector=None, **common), args)
    return stock, [our_arm(policy, args, common, say) for policy in args.policies]


def our_arm(
    policy: str, args: argparse.Namespace, common: dict[str, Any], say: Callable[[str], None]
) -> Arm:
    say(f"building ours with {policy}: {args.pinned} pins, {args.dram_blocks} blocks in DRAM")
    config = {"dram_bytes": args.dram_blocks * SLOT_BYTES, "policy": policy}
    config |= {"ttl_s": 3600, "max_ttl_s": 3600}
    engine = Engine(extra_config=config, **common)
    assert engine.connector.costs.restore(KNOWN_COSTS) == 0
    pin_programs(engine, args.pinned, args.prompt)
    fill_dram(engine.connector.side, args.dram_blocks, args.pinned)
    return Arm(policy, engine, args)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both halves; returns the numbers of the table."""
    say = (
        (lambda text: print(f"  {text} ...", file=sys.stderr, flush=True))
        if args.progress
        else print
    )
    stock, ours = build_arms(args, say)
    say("warming up")
    for _ in range(args.warmup):
        for arm in (stock, *ours):
            arm.step()
    for arm in (stock, *ours):
        arm.step_us.clear()
        arm.hook_us.clear()
    gc.collect()
    gc.freeze()  # as EngineCore does once it is built (freeze_gc_heap)
    for done in range(args.steps):
        for arm in (stock, *ours):
            arm.step()
        if done % max(1, args.steps // 4) == 0:
            say(f"step {done} of {args.steps}")
    result = {
        "running": args.running,
        "stock_step_us": stock.step_us,
        "ours": {arm.name: samples(arm) for arm in ours},
    }
    say("measuring worker steps")
    result["worker"] = measure_worker(args.steps)
    return result


def samples(arm: Arm) -> dict[str, Any]:
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["fixed_ttl", "adaptive"], metavar="NAME")
    parser.add_argument("--running", type=int, default=256, help="turns decoding at once")
    parser.add_argument("--pinned", type=int, default=1000, help="programs pinned meanwhile")
    parser.add_argument("--dram-blocks", type=int, default=100_000, help="blocks in DRAM")
    parser.add_argument("--vram-blocks", type=int, default=60_000, help="VRAM pool in blocks")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens of each turn")
    parser.add_argument("--output", type=int, default=128, help="output tokens, at least")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured of each arm")
    parser.add_argument("--warmup", type=int, default=200, help="steps before that")
    parser.add_argument("--json", type=Path, help="write all samples here")
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress lines")
    args = parser.parse_args()
    result = run(args)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
