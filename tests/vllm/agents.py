"""AgentEngine: the harness with our connector, driven by turns, its books checked every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from continuum_connector.observe.account import PIN_CAUSES
from tests.proofs import prove_holds
from tests.vllm.fake_worker import extend_chain, next_token
from tests.vllm.harness import Engine, prompt


class AgentEngine(Engine):
    """After each step: held + free == total, every foreign reference is ours, pins balance."""

    def __init__(self, num_blocks: int = 100, **kwargs: Any) -> None:
        super().__init__(num_blocks, **kwargs)
        self.side = self.connector.side

    def run_turn(self, request_id: str, tokens: list[int] | int, **kwargs: Any) -> float:
        """Run one turn to its end, and any other that is there; return when it ended."""
        self.add(request_id, tokens, **kwargs)
        self.run_until_idle()
        assert request_id in self.finish_reasons, self.describe()
        return self.clock()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def check(self) -> None:
        super().check()
        if getattr(self, "side", None) is None:
            return
        ours: set[int] = set()
        for holds in (self.side.retention.holds, self.side.traffic.holds):
            prove_holds(holds)
            ours.update(np.nonzero(holds._refs)[0].tolist())
        assert dict.fromkeys(ours, 1) == self.foreign_refs(), "neither a request's nor ours"
        started, ended = self.total("pins_started"), sum(self.ends().values())
        assert started == ended + len(self.side.pins), "a pin ended without a cause, or twice"
        closed = self.total("outcomes") + len(self.side.decider.away.decisions())
        assert self.total("decisions") == closed, "a decision has no outcome, or two"

    # --- what the metrics say -------------------------------------------------------------
    def total(self, name: str, label: str | None = None) -> int:
        return int(self.connector.account.total(name, label))

    def ends(self) -> dict[str, int]:
        """How many pins ended by which cause; causes that did not occur are left out."""
        counts = {cause: self.total("pins_ended", cause) for cause in PIN_CAUSES}
        return {cause: n for cause, n in counts.items() if n}

    def num_pins(self) -> int:
        return len(self.side.pins)

    def pinned_blocks(self) -> int:
        return int(self.side.retention.holds.num_blocks)


def whole(engine: Engine, num_tokens: int) -> int:
    """All that can be hit of a turn of so many tokens: the last of them has no KV."""
    size = engine.connector.side.groups.scheduler_size
    return int((num_tokens - 1) // size * size)


def others_take_the_pool(engine: Engine, seed: int = 90, num_tokens: int = 900) -> None:
    """Foreign programs that end, one after the other: what is free has been theirs afterwards."""
    for i in range(4):
        name = f"x{seed + i}"
        engine.add(name, num_tokens, max_tokens=2, seed=seed + i, program=f"x{seed}", final=True)
        engine.run_until_idle()


def play_under_pressure(engine: AgentEngine, answer: int, num_dropped: int = 0) -> None:
    """Three turns of a program, and others after each: the next hits all of it, but for as many
    tokens as drafts drop."""
    tokens = prompt(500)
    for turn in range(3):
        request_id = f"a{turn}"
        engine.run_turn(request_id, tokens, max_tokens=answer, program="p")
        if turn:
            hit = whole(engine, len(tokens) - 20 - num_dropped)
            assert engine.cached[request_id] == (hit, 0)
        others_take_the_pool(engine, seed=90 + 10 * turn)
        tokens = engine.next_prompt(request_id, 20, seed=turn)


def pinned(num_blocks: int, num_pins: int, **kwargs: Any) -> AgentEngine:
    """An engine in which programs p0, p1, ... have pinned 25 blocks each."""
    extra = {"ttl_s": 60, **kwargs.pop("extra_config", {})}
    engine = AgentEngine(num_blocks, max_num_batched_tokens=2048, extra_config=extra, **kwargs)
    for i in range(num_pins):
        engine.add(f"a{i}", 400, program=f"p{i}", seed=i)
        engine.run_until_idle(until=lambda i=i: f"a{i}" in engine.finish_reasons)
    assert engine.num_pins() == num_pins
    return engine


def live(engine: AgentEngine) -> list[str]:
    return sorted(pin.program.removeprefix("job:") for pin in engine.side.pins)


def model_output(tokens: list[int], num_outputs: int) -> list[int]:
    chain: list[int] = []
    extend_chain(chain, tokens)
    outputs: list[int] = []
    for _ in range(num_outputs):
        outputs.append(next_token(chain, len(chain)))
        extend_chain(chain, outputs[-1:])
    return outputs
