"""What the end of a long turn and the begin of the next one cost, by kinds of KV groups.

Programs take turns in a VRAM that holds one of them, so each finds in DRAM what it left. Timed,
in CPU time of the scheduler's thread: the hook at a turn's end, and of it the question which
blocks the next turn will hit; the question how much of a prompt DRAM has, when it is asked first
and when it is asked again in the next step. Run from the repository root:

    python -m bench.hook_cost.turns
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

import numpy as np

from bench.cli import positive, start, teaching_parser
from bench.common.plans import ProgramPlan, Streams, Talk
from bench.sim import versions
from bench.sim.agenda import Clock
from bench.sim.arms import ARMS, Asking
from bench.sim.bus import Bus
from bench.sim.engine import Engine
from bench.sim.hardware import GB, machine
from continuum_connector.scheduler.kv_groups import STATE, WINDOW, KvGroup

ARM = ARMS["lru_offload"]  # which stores every turn and pins none
CACHES: dict[str, tuple[KvGroup, ...]] = {
    "full": (KvGroup(0, 16),),
    "full and a window of 128": (KvGroup(0, 16), KvGroup(1, 16, WINDOW, 128)),
    "full and three of states": (
        KvGroup(0, 544),
        *(KvGroup(index, 544, STATE) for index in (1, 2, 3)),
    ),
}
NUM_NEW, NUM_ANSWERED = 600, 8  # tokens that a second turn adds, and that every turn is answered


class LongTurns(Engine):
    """An engine whose KV cache has these groups. `us`: microseconds by what was timed."""

    def __init__(self, groups: Sequence[KvGroup], num_tokens: int, num_programs: int) -> None:
        self.groups = groups
        size = max(group.block_size for group in groups)
        per_turn = len(groups) * (num_tokens + NUM_NEW + 2 * size)
        dram_gb = (num_programs + 1) * 2 * per_turn * 131_072 / GB
        on = machine("H200", kv_tokens=per_turn, block_size=size, dram_gb=dram_gb)
        super().__init__(on, Clock(), 2 * num_tokens, ARM.transfer(on))
        self.worker = ARM.worker(self, Bus(on.pcie_rate, on.pcie_both))
        ARM.prepare(self, lambda name, now: None)
        self.us: dict[str, list[float]] = defaultdict(list)
        self._time("end of a turn", self.connector, "request_finished_all_groups")
        self._time("its blocks", self.connector.side.groups, "take_kept")

    def layout(self) -> Any:
        return versions.cache_of(
            self.machine.num_blocks, self.groups, self.machine.model.token_bytes
        )

    def turn(self, plan: ProgramPlan, index: int) -> int:
        """Run a turn to its end; returns how many tokens of its prompt DRAM had."""
        turn = plan.turns[index]
        args = ARM.args(Asking(plan, turn, index, 0.0, 0.0))
        name = f"{plan.name}/{index}"
        self.add(name, turn.tokens(), turn.answer.tokens(), self.clock.now, 0, args)
        found = 0
        for what in ("first look", "asked again") if index else ():
            began = time.thread_time()
            found = self.connector.side.tier.find(self.scheduler.requests[name], 0)
            self.us[what].append((time.thread_time() - began) * 1e6)
        while self.has_requests:
            for _ in self.step(self.worker.next_done):
                pass
        return found

    def _time(self, what: str, target: Any, method: str) -> None:
        original = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.us[what].append((time.thread_time() - began) * 1e6)

        setattr(target, method, timed)


def programs(num_programs: int, num_tokens: int) -> list[ProgramPlan]:
    """Programs of two turns that have nothing in common."""
    streams, made = Streams(), []
    for number in range(num_programs):
        talk = Talk(streams)
        talk.turn(num_tokens, NUM_ANSWERED)
        talk.turn(NUM_NEW, NUM_ANSWERED)
        made.append(ProgramPlan(f"p{number}", talk.turns()))
    return made


def measure(groups: Sequence[KvGroup], num_programs: int, num_tokens: int) -> dict[str, Any]:
    """Each program's first turn, then each one's second: medians in microseconds, and the share of
    the first turns' tokens that the second ones found in DRAM."""
    engine = LongTurns(groups, num_tokens, num_programs)
    plans = programs(num_programs, num_tokens)
    found = [engine.turn(plan, index) for index, plan in itertools.product((0, 1), plans)]
    us = {what: float(np.median(values)) for what, values in engine.us.items()}
    return {"found": sum(found) / num_programs / num_tokens, **us}


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.turns", __doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=50_000, help="of each first prompt")
    parser.add_argument("--programs", type=positive, default=20, help="of two turns each")
    args = parser.parse_args()
    columns = ("end of a turn", "its blocks", "first look", "asked again")
    print(f"{args.programs} programs, prompts of {args.tokens:,} tokens, median CPU us")
    print(f"\n| KV groups | tokens a block | {' | '.join(columns)} | found in DRAM |")
    print("|---" * (len(columns) + 3) + "|")
    for name, groups in CACHES.items():
        row = measure(groups, args.programs, args.tokens)
        times = " | ".join(f"{row[column]:.0f}" for column in columns)
        print(f"| {name} | {groups[0].block_size} | {times} | {row['found']:.1%} |", flush=True)


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.turns")
