"""Agents that chat, messages in and words out, all at once.

What an agent framework does, template and streaming included; elsewhere token ids are sent, so
that every way to serve computes exactly the same. `job_id` and `is_last_step`
travel in `vllm_xargs`; stock vLLM takes no notice of them, so all arms get the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.plans import ProgramPlan
from bench.serve.api import Api, Patience
from bench.serve.arrivals import Arrivals
from bench.serve.load import Driver, Load
from bench.serve.programs import Defaults
from bench.serve.results import Loaded, Run
from bench.serve.server import SERVED_NAME
from bench.serve.token_ids import Tokens

ONE_TRY = Patience(timeout_s=300.0, retries=0)


@dataclass(frozen=True)
class Planned:
    """Programs that are drawn already, each with its time."""

    plans: Sequence[ProgramPlan]
    name: str = "chat"

    @property
    def defaults(self) -> Defaults:
        return Defaults("planned", times_s=tuple(plan.arrival_s for plan in self.plans))

    @property
    def size(self) -> int:
        return len(self.plans)

    def program(self, number: int, seed: int) -> ProgramPlan:
        return self.plans[number]


async def run_agents(url: str, plans: Sequence[ProgramPlan]) -> Loaded:
    """Run every program at its time; return what came of them when the last one is done."""
    work = Planned(plans)
    arrivals = Arrivals(work.defaults.arrivals, work.defaults.times_s)
    book = Loaded(Path(), Run(name="chat"))
    async with Api(url, patience=ONE_TRY) as api:
        await Driver(api, Load(work, arrivals, Tokens(0), SERVED_NAME), book).run()
    return book
