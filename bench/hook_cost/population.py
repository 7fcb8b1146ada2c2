"""Fills an engine with pinned programs and DRAM blocks, so that size can hurt if it does."""

from __future__ import annotations

import hashlib
from typing import Any

from continuum_connector.programs.program import Hints, Identity, IdentitySource
from continuum_connector.scheduler.kv_groups import block_key
from tests.vllm.harness import Engine


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


def leave_copies(engine: Engine, num_programs: int, prompt_tokens: int) -> None:
    """Run one turn of each program to its end, whose store does not end."""
    engine.worker.hold = True
    names = [f"copied{number}" for number in range(num_programs)]
    for number, name in enumerate(names):
        engine.add(name, prompt_tokens, 1, seed=2_000_000 + number, program=name)
    engine.run_until_idle(until=lambda: engine.finish_reasons.keys() >= set(names))


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
