"""Agents that chat, messages in and words out, all at once.

What an agent framework does, template and streaming included; elsewhere token ids are sent, so
that every way to serve computes exactly the same. `job_id` and `is_last_step`
travel in `vllm_xargs`; stock vLLM takes no notice of them, so all arms get the same requests.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common.plans import ProgramPlan
from bench.serve.api import Api, Patience
from bench.serve.arrivals import read_arrivals
from bench.serve.load import Driver, Load
from bench.serve.own import File, Lognormal, Own
from bench.serve.results import Loaded, Run
from bench.serve.server import SERVED_NAME
from bench.serve.tiny_model import LLAMA
from bench.serve.token_ids import Tokens
from bench.serve.tokenizer import text, words

ONE_TRY = Patience(timeout_s=300.0, retries=0)
NO_END_S = 1e6  # of arrivals: the number of programs ends them
SYSTEM_TOKENS = 96  # the same for all programs
TASK_TOKENS = (SYSTEM_TOKENS + 500, SYSTEM_TOKENS + 900)
PAUSES = Lognormal(median=0.9, sigma=0.4, most=4.0)  # most between 0.5 and 1.5 s


class Chats(Own):
    """A workload in the tiny tokenizer's words: one word, one token."""

    def program(self, number: int, seed: int) -> ProgramPlan:
        """Drawn from both, so that all arms get the same words."""
        plan, rng = super().program(number, seed), random.Random(f"{seed}:{number}")
        vocabulary = words(LLAMA.vocab)
        *shared, own = plan.turns[0].prompt
        system = text(random.Random("system"), vocabulary, sum(span.length for span in shared))
        said = [system + text(rng, vocabulary, own.length)]
        said += [text(rng, vocabulary, plan.num_new(i)) for i in range(1, len(plan.turns))]
        turns = (replace(turn, text=new) for turn, new in zip(plan.turns, said, strict=True))
        return replace(plan, name=f"agent-{number:02d}", turns=tuple(turns))


def agents(programs: int = 12, turns: int = 6, rate: float = 1.0, **more: Any) -> Chats:
    """So many, who arrive at `rate` per second; `more`: as a workload's file has it (own.py)."""
    told = {
        "name": f"chat of {programs} programs x {turns} turns",
        "arrivals": f"poisson:{rate:.12g}",
        "duration_s": NO_END_S,
        "programs": programs,
        "turns": turns,
        "shared_tokens": SYSTEM_TOKENS,
        "first_tokens": TASK_TOKENS,
        "pause_s": PAUSES,
    }
    return Chats(File(**{**told, **more}))


async def run_agents(url: str, chats: Chats, seed: int = 1) -> Loaded:
    """Run every program at its time; return what came of them when the last one is done."""
    known = chats.defaults
    arrivals = read_arrivals(known.arrivals, seed, known.duration_s, known.programs)
    book = Loaded(Path(), Run(name="chat"))
    async with Api(url, patience=ONE_TRY) as api:
        await Driver(api, Load(chats, arrivals, Tokens(seed), SERVED_NAME), book).run()
    return book
