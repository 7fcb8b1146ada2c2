"""Engines under measurement: stock and ours, stepped in turn in one process."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.cli import many, positive, teaching_parser
from bench.common.known_costs import know
from bench.hook_cost.population import fill_dram, leave_copies, remember_programs, run_turns
from bench.hook_cost.rivals import RIVALS
from continuum_connector.config import POLICIES
from tests.vllm.harness import Engine
from tests.vllm.tiering import SLOT_BYTES

NOTHING = "nothing"
OURS = ("fixed_ttl", "adaptive")
# Seconds; dear enough for `adaptive` to pin every turn for as long as it may.
KNOWN_COSTS = {"prefill": [0.01, 1e-3, 0.0, 0.0, 0.0], "load": [0.01, 1e-3]}


class TimedEngine:
    """One engine under measurement, kept at `num_turns` turns, those that wait included."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        args: argparse.Namespace,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.engine = engine
        self.num_turns = args.running
        self.step_us: list[float] = []
        self._args = args
        self._clock = clock
        self._numbers = itertools.count()
        self._clock_parts = 0.0
        for method in ("schedule", "update_from_output", "add_request"):
            self._time(engine.scheduler, method)

    def refill(self) -> None:
        """Replace the turns that ended; every one has a prompt of its own."""
        missing = self.num_turns - len(self.engine.scheduler.requests)
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
        original, clock = getattr(target, method), self._clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._clock_parts += clock() - began

        setattr(target, method, timed)


def engine_of(name: str, num_slots: int, **common: Any) -> Engine:
    """An engine with a connector that does nothing, a rival's, or ours with that policy."""
    if name == NOTHING:
        module = "bench.hook_cost.nothing"
        return Engine(
            connector="NothingConnector", connector_module=module, extra_config={}, **common
        )
    if name in RIVALS:
        config = {"cpu_bytes_to_use": num_slots * SLOT_BYTES} | RIVALS[name].options
        return Engine(connector=RIVALS[name].connector, extra_config=config, **common)
    config = {"dram_bytes": num_slots * SLOT_BYTES, "policy": name}
    engine = Engine(extra_config=config | {"ttl_s": 3600, "max_ttl_s": 3600}, **common)
    know(engine.connector.costs, KNOWN_COSTS)
    return engine


def build_pair(
    args: argparse.Namespace,
    policy: str,
    num_pins: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[TimedEngine]:
    """Stock, then ours with that policy, with one size of pool; ours with pins and a full DRAM.

    NOTHING in place of a policy is a connector that does nothing. Stock runs the turns that ours
    pins, so that as many blocks are in each prefix cache: a step looks into that, and the larger it
    is, the slower.
    """
    say = progress(args)
    common: dict[str, Any] = {
        "num_blocks": args.vram_blocks,
        "max_num_seqs": args.running,
        "max_num_batched_tokens": 8192,
    }
    say(f"building stock, and {policy}: {num_pins} pins, {args.dram_blocks} blocks in DRAM")
    stock = Engine(connector=None, **common)
    ours = engine_of(policy, args.dram_blocks, **common)
    run_turns(stock, num_pins + args.copies, args.prompt)
    if policy == NOTHING:
        run_turns(ours, num_pins + args.copies, args.prompt)
    else:
        remember_programs(ours.connector.side, args.programs)
        run_turns(ours, num_pins, args.prompt)  # each is pinned
        fill_dram(ours.connector.side, args.dram_blocks, args.programs)
        if args.copies:
            leave_copies(ours, args.copies, args.prompt)
    for engine in (stock, ours):
        engine.check = lambda: None  # of every block, between the steps: cold caches
    arms = (("stock", stock), (policy, ours))
    return [TimedEngine(name, engine, args, clock) for name, engine in arms]


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


def options(
    name: str, doc: str, others: Sequence[str] = (), **defaults: Any
) -> argparse.ArgumentParser:
    """What every bench over arms is asked with; `others` may run in the place of ours, `defaults`
    replace the ones here."""
    parser = teaching_parser(f"python -m bench.hook_cost.{name}", doc.splitlines()[0])
    add = parser.add_argument
    known, told = (*others, *POLICIES), f"of {', '.join((*others, *OURS))}"
    add("--policies", nargs="+", default=(*others, *OURS), choices=known, metavar="NAME", help=told)
    add("--running", type=positive, default=256, help="turns decoding at once")
    add("--programs", type=many, default=10_000, help="programs remembered")
    add("--dram-blocks", type=many, default=100_000, help="blocks in DRAM")
    add("--vram-blocks", type=positive, default=60_000, help="VRAM pool in blocks")
    add("--copies", type=many, default=0, help="stores of ours that are under way meanwhile")
    add("--prompt", type=positive, default=256, help="prompt tokens of each turn")
    add("--output", type=positive, default=256, help="output tokens, at least")
    add("--steps", type=positive, default=300, help="steps of each arm and row")
    add("--warmup", type=positive, default=60, help="steps before that")
    add("--json", type=Path, help="write all samples here")
    add("--quiet", dest="progress", action="store_false", help="no progress lines")
    parser.set_defaults(**defaults)
    return parser


def progress(args: argparse.Namespace) -> Callable[[str], None]:
    """What says on stderr how far we are, unless it is not wanted."""
    if not args.progress:
        return lambda text: None
    return lambda text: print(f"  {text} ...", file=sys.stderr, flush=True)
