"""How many loads could begin beside the step that is being computed, and what that would save.

    python -m bench.sim.apart "fast/near" "coding/dram 2" --seed 1

A load waits for the whole step in flight, because that step may still write the blocks it fills.
Where none of its blocks was freed in the last two steps, no step in flight does. Counts these
loads in cells of the matrix, and adds up the steps that they wait for: the most that all jobs
together could win, if copies took no time.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

from bench.cli import start
from bench.sim.arms import ARMS
from bench.sim.cells import Scene, load_matrix, scene
from bench.sim.engine import Finished
from bench.sim.lab import Lab
from continuum_connector.tools.cli.ending import ToldError

STEPS_BEHIND = 2  # the one that is computed, and the one that is being put together


class Apart:
    """Follows a lab's run. `num_apart` of `num_loads` have no block that was freed lately."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.num_loads = self.num_apart = 0
        self.waits_s = 0.0  # how long the loads apart wait: the step before them, whole
        self._freed: deque[set[int]] = deque([set()], maxlen=STEPS_BEHIND)
        self._step_s = 0.0
        engine = lab.engine
        pool = engine.scheduler.kv_cache_manager.block_pool
        traffic = engine.connector.side.tier.traffic
        self._free, self._load, self._step = pool.free_blocks, traffic.load, engine.step
        self._watched = [
            patch.object(pool, "free_blocks", self._frees),
            patch.object(traffic, "load", self._loads),
            patch.object(engine, "step", self._steps),
        ]

    def play(self) -> float:
        """Run the lab; the seconds of all its jobs."""
        for each in self._watched:
            each.start()
        try:
            return sum(self.lab.play().jct_s.values())
        finally:
            for each in self._watched:
                each.stop()

    def _frees(self, blocks: Iterable[Any]) -> None:
        blocks = list(blocks)
        self._freed[-1].update(block.block_id for block in blocks if block.ref_cnt == 1)
        self._free(blocks)

    def _steps(self, wake: Callable[[], float]) -> Iterable[Finished]:
        self._freed.append(set())
        before = self.lab.engine.busy_s
        yield from self._step(wake)
        self._step_s = self.lab.engine.busy_s - before

    def _loads(self, owner: Any, program: str, request_id: str, blocks: Any, *rest: Any) -> Any:
        self.num_loads += 1
        if set().union(*self._freed).isdisjoint(map(int, blocks)):
            self.num_apart += 1
            self.waits_s += self._step_s
        return self._load(owner, program, request_id, blocks, *rest)


def row(name: str, found: Scene) -> str:
    """A line of the table, once the cell is played."""
    apart = Apart(Lab(found.machine, ARMS["adaptive"], found.workload))
    jobs_s = apart.play()
    share = apart.num_apart / max(1, apart.num_loads)
    return f"| {name} | {apart.num_loads} | {share:.0%} | {apart.waits_s / jobs_s:.1%} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim.apart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cells", nargs="+", help="names of the matrix' cells")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    said = parser.parse_args(arguments)
    known = {cell.name: cell for cell in load_matrix().cells}
    if strange := [name for name in said.cells if name not in known]:
        raise ToldError(
            f"{', '.join(strange)}: no such cell, so nothing was run; there are {', '.join(known)}"
        )
    print("| cell | loads | could begin at once | of all jobs' time, at most |\n|---|---|---|---|")
    for name in said.cells:
        print(row(name, scene(known[name], said.seed)), flush=True)
    return 0


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.apart")
