"""What the gate costs a step while it holds turns, and what it costs a turn that comes to it.

So many programs are under way, more than VRAM holds, and so many first turns are held. In every
step one of those gives up, and another comes. Timed, in CPU time of the scheduler's thread: what
the gate does before and after a step, and its answer to the turn that comes. Run from the
repository root:

    python -m bench.hook_cost.gate
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

import numpy as np

from bench.cli import positive, start, teaching_parser
from tests.vllm.agents import AgentEngine

PROMPT, NUM_RUNNING = 512, 32
COSTS = {"prefill": [0.0, 1.0, 0.0, 0.0, 0.0]}  # seconds a token: no idle time ever pays for one
SIZES = ((1000, 1000), (1000, 10_000), (10_000, 1000))


def measure(num_under_way: int, num_held: int, num_steps: int) -> dict[str, Any]:
    """CPU microseconds by what was timed: of each step, and of each turn that came."""
    engine = _crowd(num_under_way, num_held)
    gate = engine.side.gate
    us: dict[str, list[float]] = defaultdict(list)
    for method in ("open", "stepped", "holds"):
        _time(gate, method, us[method])
    gc.collect()
    gc.freeze()  # as EngineCore does once it is built (freeze_gc_heap)
    for number in range(num_steps):
        engine.abort(f"held{number}")
        _first_turn(engine, num_held + number)
        engine.step()
    assert (len(gate), len(gate.working_set)) == (num_held, num_under_way), "somebody began"
    return {
        "step": np.add(us["open"][-num_steps:], us["stepped"][-num_steps:]),
        "arrival": np.array(us["holds"]),
    }


def _crowd(num_under_way: int, num_held: int) -> AgentEngine:
    """Each program under way has had two turns and is awaited; the third turn of some runs."""
    config = {"gate_wait_s": 1e6, "dram_bytes": 0, "policy": "program_order"}
    engine = AgentEngine(
        NUM_RUNNING * (PROMPT // 16 + 100), max_num_seqs=NUM_RUNNING, extra_config=config
    )
    # It looks at every block between the steps, which leaves cold caches.
    engine.check = lambda: None  # type: ignore[method-assign]
    assert engine.connector.costs.restore(COSTS) == 0
    for turn in (1, 2):  # of all, one after the other: so each is awaited for as long as that took
        for number in range(num_under_way):
            name = f"program{number}"
            engine.add(f"{name}/{turn}", PROMPT, 1, seed=number, program=name)
            engine.run_until_idle()
    for number in range(NUM_RUNNING):
        name = f"program{number}"
        engine.add(f"{name}/3", PROMPT, 3000, seed=number, program=name)
    for number in range(num_held):
        _first_turn(engine, number)
    for _ in range(2 * NUM_RUNNING):  # until all of those run
        engine.step()
    return engine


def _first_turn(engine: AgentEngine, number: int) -> None:
    name = f"held{number}"
    engine.add(name, PROMPT, 1, seed=1_000_000 + number, program=name)


def _time(target: Any, method: str, us: list[float]) -> None:
    original = getattr(target, method)

    def timed(*args: Any) -> Any:
        began = time.thread_time()
        try:
            found = original(*args)
            return found if isinstance(found, bool) or found is None else iter(list(found))
        finally:
            us.append((time.thread_time() - began) * 1e6)

    setattr(target, method, timed)


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.gate", __doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=500, help="measured of each row")
    args = parser.parse_args()
    print("| programs under way | turns held | a step: median us | P99 | a turn that comes | P99 |")
    print("|---|---|---|---|---|---|")
    for under_way, held in SIZES:
        timed = measure(under_way, held, args.steps)
        columns = (f"{q:.1f}" for us in timed.values() for q in np.percentile(us, (50, 99)))
        print(f"| {under_way:,} | {held:,} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.gate")
