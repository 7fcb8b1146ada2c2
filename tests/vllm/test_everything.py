"""Everything at once: random programs finish, with the model's own output."""

from __future__ import annotations

import random

import pytest

from tests.vllm.agents import AgentEngine, model_output
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import MODES

TIER = {"dram_bytes": "4MiB"}


class Agents:
    """Programs with random turns: extended, forked and aborted, at random times."""

    def __init__(self, engine: AgentEngine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.last: dict[int, str] = {}
        self.num_turns = 0

    def run(self, num_programs: int = 6, num_turns: int = 24) -> None:
        draw = self.random
        while self.num_turns < num_turns:
            program = draw.randrange(num_programs)
            if self.last.get(program) in self.engine.scheduler.requests and draw.random() < 0.9:
                self.engine.steps(draw.randrange(1, 20))
            else:
                self._turn(program)
            if draw.random() < 0.1:
                self.engine.abort(draw.choice(list(self.engine.requests)))
            if draw.random() < 0.3:
                self.engine.clock.advance(draw.random() * 2)
        self.engine.run_until_idle(max_steps=6000)

    def _turn(self, program: int) -> None:
        draw, engine = self.random, self.engine
        tokens = prompt(draw.randrange(10, 250), seed=program % 3)
        before = self.last.get(program)
        if before is not None:
            tokens = list(engine.requests[before].all_token_ids)
            tokens = tokens[: draw.choice([len(tokens), len(tokens), len(tokens) // 2])]
            tokens += prompt(draw.randrange(1, 120), seed=self.num_turns)
        if len(tokens) > 600:
            tokens = prompt(50, seed=100 + self.num_turns)
        self.num_turns += 1
        name = f"{program}.{self.num_turns}"
        self.last[program] = name
        stop = ["x"] if draw.random() < 0.2 else None
        outputs = draw.randrange(1, 100)
        final = draw.random() < 0.1
        engine.add(name, tokens, program=f"p{program}", max_tokens=outputs, stop=stop, final=final)


@MODES
@pytest.mark.parametrize("extra", [{}, TIER], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_everything_finishes_with_the_models_own_output(
    async_scheduling: bool, extra: dict[str, str], seed: int
) -> None:
    groups = "hybrid" if seed % 2 else "full"
    engine = AgentEngine(
        {"full": 52, "hybrid": 150}[groups],
        groups=groups,
        async_scheduling=async_scheduling,
        extra_config=dict(extra),
        max_num_seqs=4,
    )
    Agents(engine, seed).run()
    assert set(engine.finish_reasons) | _aborted(engine) == set(engine.requests)
    for request_id, outputs in engine.outputs.items():
        tokens = engine.requests[request_id].prompt_token_ids
        assert outputs == model_output(tokens, len(outputs)), request_id
    engine.clock.advance(60)
    engine.run_until_idle()
    assert (engine.usage(), engine.num_pins()) == (0, 0)
    assert engine.ends().get("pressure")


def _aborted(engine: Engine) -> set[str]:
    return {i for i, r in engine.requests.items() if r.status.name == "FINISHED_ABORTED"}
