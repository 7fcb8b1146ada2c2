"""Agents that chat, messages in and words out, all at once.

What an agent framework does, template and streaming included; elsewhere token ids are sent, so
that every way to serve computes exactly the same. `job_id` and `is_last_step`
travel in `vllm_xargs`; stock vLLM takes no notice of them, so both arms get the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.plans import ProgramPlan
from bench.serve.api import Api, Patience
from bench.serve.arrivals import Arrivals
from bench.serve.load import Driver, Load
from bench.serve.programs import Defaults
from bench.serve.results import Loaded, Run, Turn
from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.token_ids import Tokens

ONE_TRY = Patience(timeout_s=300.0, retries=0)
PLANNED = "planned"  # arrivals that the plans say


@dataclass(frozen=True)
class Planned:
    """Programs that are drawn already."""

    plans: Sequence[ProgramPlan]
    name: str = "chat"

    @property
    def defaults(self) -> Defaults:
        return Defaults(PLANNED)

    @property
    def size(self) -> int:
        return len(self.plans)

    def program(self, number: int, seed: int) -> ProgramPlan:
        return self.plans[number]


async def run_agents(
    url: str,
    plans: Sequence[ProgramPlan],
    on_turn: Callable[[Turn], None] | None = None,
) -> Loaded:
    """Run every program at its time; return what came of them when the last one is done."""
    arrivals = Arrivals(PLANNED, times_s=tuple(plan.arrival_s for plan in plans))
    load = Load(Planned(plans), arrivals, Tokens(0), SERVED_NAME)
    book = Loaded(Path(), Run(name="chat"))
    async with Api(url, patience=ONE_TRY) as api:
        await Driver(api, load, book, on_turn).run()
    return book


def touch(server: VllmServer) -> None:
    """One more step: a server's first request pays for imports, a connector's counters travel with
    the next step."""
    server.post("/v1/completions", {"model": SERVED_NAME, "prompt": "hello", "max_tokens": 1})


def pool_blocks(live_tokens: float, plans: Iterable[ProgramPlan], block_size: int) -> int:
    """A VRAM pool for so many tokens, and for the longest context at least."""
    longest = max(plan.num_tokens for plan in plans)
    return math.ceil(max(live_tokens, 1.2 * longest) / block_size) + 1
