"""What a step costs in which one long turn ends and the next turn of its program begins.

Each arm runs in a process of its own, with caches as cold as a model runner leaves them: other work
comes between any two steps. The processes take some steps in turn, one after the other, so that a
machine that is slow for a while is slow for all. What must be done before the step is launched
(`add_request`, `schedule`) and after it (`update_from_output`) is told apart. Calls and bytecodes
are counted in further steps; a count is the same however busy the machine is. Run from the
repository root:

    python -m bench.hook_cost.turns
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.outputs import ModelRunnerOutput

import continuum_connector
from bench.cli import many, positive, start, teaching_parser
from bench.common.tables import markdown
from bench.hook_cost.arms import (
    NOTHING,
    OURS,
    RIVALS,
    STOCK,
    engine_of,
    fill_dram,
    remember_programs,
    say,
)
from continuum_connector.connector import WorkerMetadata
from continuum_connector.messages import StepPlan, TransferOutcome, WorkerReport
from tests.vllm.harness import runner_output
from tests.vllm.tiering import BLOCK, SLOT_BYTES

ARMS = (STOCK, NOTHING, *RIVALS, *OURS)
SIZES = {"running": 256, "warmup": 20}  # turns that decode at once, steps before any is timed
NEW_TOKENS = 64  # of a tool's answer
ROUND = 10  # steps of one arm, before the others take as many
Around = Callable[[str], AbstractContextManager[Any]]  # of a part of a step: before, after
PACKAGE = str(Path(continuum_connector.__file__).parent) + os.sep


class Sampler:
    """A rank that samples a token per request and has no KV; copies settle in the next step."""

    def __init__(self, half: Any, clock: Callable[[], float]) -> None:
        """`half`: the worker half of a rival, None for ours."""
        self._half, self._clock = half, clock
        self._left: dict[str, int] = {}  # tokens of prompts to compute yet
        self._report = WorkerReport()
        self._num = 0

    def report_ready(self, num_slots: int) -> None:
        self._report.ready_slots[0] = num_slots

    def run(self, step: Any) -> ModelRunnerOutput:
        report, self._report = self._report, WorkerReport()
        plan = getattr(step.kv_connector_metadata, "plan", None) or StepPlan()
        for order in (*plan.loads, *plan.stores):
            done = TransferOutcome(num_done=1, num_bytes=SLOT_BYTES, seconds=1e-3)
            self._report.outcomes[order.transfer_id] = done
        for new in step.scheduled_new_reqs:
            self._left[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens
        for request_id in step.finished_req_ids:
            del self._left[request_id]
        sampled = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._left[request_id] -= num_tokens
            self._num += 1
            sampled[request_id] = [100 + self._num % 29_999] if self._left[request_id] <= 0 else []
        told: dict[str, Any] = {}
        if self._half is not None:
            self._half.start(step, self._clock(), self._clock())
            told = self._half.output(self._clock())
        elif not report.is_empty:
            told = {"kv_connector_worker_meta": WorkerMetadata(report)}
        return runner_output(sampled, told)


class Arm:
    """One engine in which, once it is warm, a turn ends and another begins in each step."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._args = args
        num_turns = (args.running + args.warmup + args.steps) // args.running + 2  # of a program
        per_turn = (args.context + num_turns * (args.running + NEW_TOKENS)) // BLOCK + 2
        common: dict[str, Any] = {
            "num_blocks": int(1.1 * args.running * per_turn) + 1000,
            "max_num_seqs": args.running,
            "max_num_batched_tokens": max(8192, args.context),
        }
        num_slots = 2 * args.running * per_turn
        self.engine = engine_of(name, num_slots, **common)
        self.scheduler = self.engine.scheduler
        half = RIVALS[name].half() if name in RIVALS else None
        self._sampler = Sampler(half, self.engine.clock)
        side = getattr(self.engine.connector, "side", None)
        if side is not None:
            self._sampler.report_ready(num_slots)
            remember_programs(side, args.programs)
        self._numbers = np.random.default_rng(1)
        self._back: deque[str] = deque()  # programs whose next turn comes with the next step
        self._num_turns: dict[str, int] = {}
        for number in range(args.running):
            # Begun one by one, they end one by one.
            self._add(f"program{number}", self._tokens(args.context), args.running)
            self._step()
        if side is not None:
            fill_dram(side, num_slots, args.programs)
        for _ in range(args.running + args.warmup):
            self.step()

    def step(self, around: Around = nullcontext) -> None:
        """The turn that ended in the last step is followed by its program's next, and one step is
        taken. `around(part)`: a context for what is done before the launch, and after it."""
        while self._back:
            program = self._back.popleft()
            older = self.engine.requests.pop(f"{program}.{self._num_turns[program]}")
            tokens = [*older.all_token_ids, *self._tokens(NEW_TOKENS)]
            self._add(program, tokens, self._args.running, around)
        self._step(around)

    def _add(self, program: str, tokens: list[int], num: int, around: Around = nullcontext) -> None:
        turn = self._num_turns[program] = self._num_turns.get(program, 0) + 1
        with around("before"):
            self.engine.add(f"{program}.{turn}", tokens, num, program=program)

    def _step(self, around: Around = nullcontext) -> None:
        self.engine.clock.advance(self.engine.step_s)
        with around("before"):
            step = self.scheduler.schedule()
        output = self._sampler.run(step)
        with around("after"):
            told = self.scheduler.update_from_output(step, output)
        for batch in told.values():
            for each in batch.outputs:
                if each.finish_reason is not None:
                    self._back.append(each.request_id.rpartition(".")[0])

    def _tokens(self, number: int) -> list[int]:
        found: list[int] = self._numbers.integers(100, 30_000, number).tolist()
        return found


# --- what is measured -----------------------------------------------------------------------
@contextmanager
def timed(us: dict[str, float], part: str) -> Iterator[None]:
    """Add the CPU time of a part, in microseconds."""
    began = time.thread_time()
    yield
    us[part] += (time.thread_time() - began) * 1e6


class Counted:
    """Python calls and bytecodes of the parts of some steps: of ours, and of all code."""

    def __init__(self) -> None:
        self.numbers: dict[str, dict[str, int]] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        of_part = self.numbers.setdefault(
            part, dict.fromkeys(("calls", "codes", "our_calls", "our_codes"), 0)
        )

        def called(frame: Any, _event: str, _arg: Any) -> Any:
            is_ours = frame.f_code.co_filename.startswith(PACKAGE)
            of_part["calls"] += 1
            of_part["our_calls"] += is_ours
            frame.f_trace_opcodes, frame.f_trace_lines = True, False

            def trace(_frame: Any, event: str, _arg: Any) -> Any:
                if event == "opcode":
                    of_part["codes"] += 1
                    of_part["our_codes"] += is_ours
                return trace

            return trace

        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(None)


def _other_work() -> Callable[[], None]:
    """As much of other code and data between two steps as a model runner has, or more."""
    table = np.ones(8 << 20)
    tree = {str(n): {"name": "x" * n, "values": list(range(n)), "next": {}} for n in range(60)}

    def work() -> None:
        table.sum()
        json.loads(json.dumps(copy.deepcopy(tree), indent=1, sort_keys=True))

    return work


class Measured:
    """One arm, warm, in this process."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._args = name, args
        say(f"{name}: contexts of {args.context:,} tokens, {args.running} of them")
        self._arm = Arm(name, args)
        self._chill = _other_work()
        self._us: dict[str, list[float]] = {"before": [], "after": []}  # of each step
        gc.collect()
        gc.freeze()  # as EngineCore does once it is built (freeze_gc_heap)
        say(f"{name}: ready")

    def step(self, num: int) -> None:
        """Take so many; their times are kept."""
        for _ in range(num):
            self._chill()
            us = dict.fromkeys(self._us, 0.0)
            self._arm.step(partial(timed, us))
            for part, spent in us.items():
                self._us[part].append(spent)

    def result(self) -> dict[str, Any]:
        """CPU times by part in microseconds, and what is counted in some more steps."""
        counted = Counted()
        num = min(self._args.steps, 20)
        for _ in range(num):
            self._arm.step(counted)
        return {
            "arm": self._name,
            "context": self._args.context,
            "us": self._us,
            "counts": {
                part: {key: value / num for key, value in numbers.items()}
                for part, numbers in counted.numbers.items()
            },
        }


class Process(BaseManager):
    """A process of its own for one arm, whose proxy takes as many steps as it is told to."""

    measured: Callable[[str, argparse.Namespace], Measured]


Process.register("measured", Measured)


def _print_on_stderr() -> None:
    sys.stdout = sys.stderr  # vLLM may print


@contextmanager
def in_process(name: str, args: argparse.Namespace) -> Iterator[Measured]:
    """An arm in a process of its own, ready: none is built while another is."""
    process = Process(ctx=multiprocessing.get_context("spawn"))
    process.start(_print_on_stderr)
    with process:
        yield process.measured(name, args)


def _in_turn(names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all arms, which take `ROUND` steps each, forwards and then backwards."""
    with ExitStack() as processes:
        arms = [processes.enter_context(in_process(name, args)) for name in names]
        for done in range(0, args.steps, ROUND):
            num = min(ROUND, args.steps - done)
            for arm in arms if done // ROUND % 2 == 0 else reversed(arms):
                arm.step(num)
        return [arm.result() for arm in arms]


# --- what is shown --------------------------------------------------------------------------
def row(result: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    """Of the table."""
    cells = [f"{result['context']:,}", result["arm"]]
    for number in (50, 99):
        step, of_stock = (_percentile(each, number) for each in (result, stock))
        cells += [f"{step / 1000:.2f}", f"{step / of_stock:.2f}"]
    for part in ("before", "after"):
        us = np.percentile(result["us"][part], 50)
        counts = result["counts"][part]
        cells += [f"{us / 1000:.2f}", f"{counts['our_calls']:,.0f}", f"{counts['our_codes']:,.0f}"]
    all_codes, of_stock = (
        sum(each["codes"] for each in one["counts"].values()) for one in (result, stock)
    )
    return [*cells, f"{all_codes - of_stock:+,.0f}"]


def _percentile(result: dict[str, Any], number: int) -> float:
    return float(np.percentile(np.sum(list(result["us"].values()), axis=0), number))


COLUMNS = (
    *("context", "arm", "a step, P50 ms", "over stock", "P99 ms", "over stock"),
    *("before the launch, ms", "our calls", "our bytecodes"),
    *("after it, ms", "our calls", "our bytecodes", "bytecodes beyond stock's"),
)


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.turns", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="stock is always measured")
    add("--contexts", type=positive, nargs="+", default=[8192, 65536], help="tokens of a context")
    add("--programs", type=many, default=10_000, help="others remembered, whose blocks fill DRAM")
    add("--steps", type=positive, default=200, help="steps that are timed; up to 20 are counted")
    add("--json", type=Path, help="write all samples here")
    args = parser.parse_args(namespace=argparse.Namespace(**SIZES))
    print(f"{args.running} running turns, one ends and one begins per step, CPU time\n")
    results, rows = [], []
    names = [STOCK, *(each for each in args.arms if each != STOCK)]
    for context in args.contexts:
        of_all = _in_turn(names, argparse.Namespace(**vars(args), context=context))
        results += of_all
        rows += [row(result, of_all[0]) for result in of_all]
    print(markdown(COLUMNS, rows))
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.turns")
