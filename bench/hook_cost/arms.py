"""Engines under measurement: stock, ours, vLLM's own connectors, one that does nothing; filled with
pinned programs and DRAM blocks, so that size can hurt if it does.

The worker halves of vLLM's connectors are the lab's (bench/sim/workers.py), on a bus that
takes no time. The prompts of these benches are never asked twice, so nothing is loaded.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from typing import Any

from bench.common.known_costs import know
from bench.sim.bus import Bus
from bench.sim.workers import OffloadingWorker, SimpleWorker
from continuum_connector.programs.program import Hints, Identity, IdentitySource
from continuum_connector.scheduler.kv_groups import block_key
from tests.vllm.harness import Engine
from tests.vllm.tiering import SLOT_BYTES

STOCK, NOTHING = "stock", "nothing"  # plain vLLM, not the policy of that name
OURS = ("fixed_ttl", "adaptive")
# Seconds; dear enough for `adaptive` to pin every turn for as long as it may.
KNOWN_COSTS = {"prefill": [0.01, 1e-3, 0.0, 0.0, 0.0], "load": [0.01, 1e-3]}
AT_ONCE = 1e15  # bytes per second


@dataclass(frozen=True)
class Rival:
    """A connector of vLLM's, the lab's worker half of it, and more of its config."""

    connector: str
    worker: type[SimpleWorker | OffloadingWorker]
    options: dict[str, str] = field(default_factory=dict)

    def half(self) -> Any:
        """A worker half whose copies take no time."""
        return self.worker(Bus(AT_ONCE, 0.0), SLOT_BYTES)


RIVALS = {
    "simple": Rival("SimpleCPUOffloadConnector", SimpleWorker),
    "offloading": Rival("OffloadingConnector", OffloadingWorker, {"eviction_policy": "lru"}),
}


def engine_of(name: str, num_slots: int, **common: Any) -> Engine:
    """An engine without a connector, with one that does nothing, a rival's, or ours with that
    policy."""
    if name == STOCK:
        return Engine(connector=None, **common)
    if name == NOTHING:
        module = "tests.vllm.idle_connector"
        return Engine(connector="IdleConnector", connector_module=module, extra_config={}, **common)
    if name in RIVALS:
        config = {"cpu_bytes_to_use": num_slots * SLOT_BYTES} | RIVALS[name].options
        return Engine(connector=RIVALS[name].connector, extra_config=config, **common)
    config = {"dram_bytes": num_slots * SLOT_BYTES, "policy": name}
    engine = Engine(extra_config=config | {"ttl_s": 3600, "max_ttl_s": 3600}, **common)
    know(engine.connector.costs, KNOWN_COSTS)
    return engine


def say(text: str) -> None:
    """On stderr, how far we are."""
    print(f"  {text} ...", file=sys.stderr, flush=True)


# --- what they are filled with ---------------------------------------------------------------
def filler(number: int) -> str:
    """The key of a program that fills DRAM. None of these is pinned: a program that stores anew
    supersedes what it stored before, and that leaves DRAM before all that is ranked."""
    return f"job:filler{number}"


def remember_programs(side: Any, num_programs: int) -> None:
    """Let each of the programs of which DRAM will have blocks have had a turn."""
    for number in range(num_programs):
        name = filler(number)
        identity = Identity(name, IdentitySource.CLIENT, Hints())
        program, _ = side.programs.begin_turn(identity, (), now=0.0)
        side.programs.end_turn(program, identity.hints, now=0.0)


def run_turns(engine: Engine, num_programs: int, prompt_tokens: int) -> None:
    """Run one turn of each program to its end."""
    for number in range(num_programs):
        name = f"pinned{number}"
        engine.add(name, prompt_tokens, 1, seed=1_000_000 + number, program=name)
        if number % 64 == 63:
            engine.run_until_idle()
    engine.run_until_idle()


def fill_dram(side: Any, num_blocks: int, num_programs: int) -> None:
    """Fill the rest of the DRAM index with made-up blocks, spread over the programs."""
    index = side.tier.index
    per_program = -(-(num_blocks - index.num_ready) // num_programs)
    for number in range(num_programs):
        seed = number.to_bytes(8, "big")
        keys = [
            block_key(hashlib.sha256(seed + block.to_bytes(8, "big")).digest(), 0)
            for block in range(per_program)
        ]
        index.settle(index.reserve(keys, filler(number), now=0.0), stored=True)
    index.gone.clear()
