"""The same operations on a stock scheduler and on ours: what each reset answers, side by side.

Where ours keeps nothing, both are in the same state all the time, so every answer, every exception
and every token is the same. Where it has pins and loads, turns begin later (a load takes steps) or
end sooner (a hit saves some), so at one moment other turns may run; then each answers by the same
rule: a reset is done if nobody runs, or if whoever runs is put back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.vllm import tiering
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import BLOCK, MODES, hold, outlast_pins, tiered

BLOCKS, NUM_OPERATIONS = 300, 50
SEEDS = pytest.mark.parametrize("seed", range(3))
PAUSES = (PauseState.UNPAUSED, PauseState.UNPAUSED, PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)
IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "tests.vllm.idle_connector",
    "kv_role": "kv_both",
}


def ours_of(policy: str) -> dict[str, Any]:
    return {
        "kv_connector": "ContinuumConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"policy": policy},
    }


def among(*connectors: dict[str, Any], **options: Any) -> Engine:
    """An engine with these connectors inside vLLM's MultiConnector."""
    extra = {"connectors": list(connectors)}
    return Engine(BLOCKS, connector="MultiConnector", extra_config=extra, **options)


@dataclass
class Pair:
    """`stock` and `ours`; `answers` counts what both said, by whether the same turns ran."""

    stock: Engine
    ours: Engine
    random: random.Random
    has_fence: bool = False  # vLLM's around freed blocks, which may be used though nobody runs
    answers: Counter[tuple[bool, str]] = field(default_factory=Counter)
    programs: dict[str, str] = field(default_factory=dict)

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.stock, self.ours

    # --- operations -------------------------------------------------------------------
    def play(self, number: int) -> None:
        operations = [self.arrive, self.arrive, self.come_back, self.come_back_late, self.step]
        operations += [
            self.step,
            self.abort,
            self.pause,
            self.wait,
            self.hold,
            self.reset,
            self.reset,
        ]
        for _ in range(number):
            self.random.choice(operations)()
        for _ in range(3):
            self.come_back_late()
        self.come_to_rest()

    def arrive(self) -> None:
        shape = self.random.choice([1, 16, 40, 130, 200]), self.random.randrange(3)
        self.add(prompt(*shape), self.random.choice(["a", "b", "c"]))

    def come_back(self) -> None:
        """The next turn of one that both have answered."""
        done = [i for i, program in self.programs.items() if program != "x"]
        done = [i for i in done if all(i in each.finish_reasons for each in self.engines)]
        if not done:
            self.arrive()
            return
        before = self.random.choice(done[-4:])
        self.add(self.stock.next_prompt(before, 20), self.programs[before])

    def come_back_late(self) -> None:
        """The same once its KV has left VRAM, for a prompt that fills it: ours loads, and its loads
        may stay under way over the next resets."""
        for engine in self.engines:
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
            engine.clock.advance(3.0)
        self.step(70)
        per_block = BLOCK // len(self.ours.groups)
        self.add(prompt((BLOCKS - 10) * per_block, 1000 + len(self.programs)), "x", num_outputs=1)
        self.step(15)
        self.hold()
        self.come_back()
        self.step(2)
        self.reset()
        self.reset()

    def add(self, tokens: list[int], program: str, num_outputs: int = 0) -> None:
        request_id = f"r{len(self.programs)}"
        self.programs[request_id] = program
        num_outputs = num_outputs or self.random.choice([1, 4, 20, 60])
        for engine in self.engines:
            engine.add(request_id, tokens, num_outputs, program=program)
        self.step()

    def step(self, number: int | None = None) -> None:
        drawn = self.random.choice([0, 1, 1, 2, 5])
        for _ in range(drawn if number is None else number):
            for engine in self.engines:
                engine.step()

    def abort(self) -> None:
        alive = [
            i for i in self.programs if any(i in each.scheduler.requests for each in self.engines)
        ]
        if alive:
            request_id = self.random.choice(alive)
            for engine in self.engines:
                engine.abort(request_id)

    def pause(self) -> None:
        state = self.random.choice(PAUSES)
        for engine in self.engines:
            engine.scheduler.set_pause_state(state)

    def wait(self) -> None:
        seconds = self.random.choice([0.1, 3.0])
        for engine in self.engines:
            engine.clock.advance(seconds)

    def hold(self) -> None:
        """Copies stay under way, or go on."""
        is_held = self.random.random() < 0.5
        hold(self.ours, is_held)
        if not is_held:
            self.ours.settle()

    def reset(self) -> None:
        how = {
            "reset_running_requests": self.random.random() < 0.4,
            "reset_connector": self.random.choice([False, True]),
        }
        runs = [{each.request_id for each in engine.scheduler.running} for engine in self.engines]
        in_step = [len(engine._queue) for engine in self.engines]
        said = [answer(engine, how) for engine in self.engines]
        if runs[0] == runs[1] and (not self.has_fence or in_step[0] == in_step[1]):
            assert said[0] == said[1], (how, runs)
        for running, each in zip(runs, said, strict=True):
            if not self.has_fence:
                is_done = how["reset_running_requests"] or not running
                assert each == ("done" if is_done else "refused"), (how, runs, said)
        self.answers[runs[0] == runs[1], said[1]] += 1

    def come_to_rest(self) -> None:
        hold(self.ours, False)
        self.ours.settle()
        for engine in self.engines:
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
            engine.run_until_idle()

    def same_tokens(self) -> bool:
        """Of turns that nobody aborted, which in either may have been further on."""
        whole = [i for i in self.programs if len(self.stock.outputs[i]) == self.max_tokens(i)]
        whole = [i for i in whole if len(self.ours.outputs[i]) == self.max_tokens(i)]
        return len(whole) > 1 and all(self.stock.outputs[i] == self.ours.outputs[i] for i in whole)

    def max_tokens(self, request_id: str) -> int:
        return int(self.stock.requests[request_id].max_tokens)


def answer(engine: Engine, how: dict[str, bool]) -> str:
    """What a reset answers; any other exception is a failure."""
    try:
        return "done" if engine.reset_prefix_cache(**how) else "refused"
    except RuntimeError as error:
        if "Failed to reset KV cache" not in str(error):
            raise
        return "raised"


@MODES
@SEEDS
def test_where_nothing_is_kept_ours_is_in_the_same_state_and_says_the_same(
    seed: int, async_scheduling: bool
) -> None:
    options = {"async_scheduling": async_scheduling}
    stock = Engine(BLOCKS, connector=None, **options)
    ours = Engine(BLOCKS, extra_config={"policy": "stock"}, **options)
    pair = Pair(stock, ours, random.Random(seed))
    pair.play(NUM_OPERATIONS)
    assert {is_same for is_same, _ in pair.answers} == {True}
    assert pair.answers[True, "done"] > 3
    assert pair.answers[True, "raised"] == 0
    assert stock.outputs == ours.outputs


@MODES
@SEEDS
@pytest.mark.parametrize("groups", ["full", "hybrid", "state"])
def test_with_pins_and_loads_a_reset_is_done_or_refused_by_the_same_rule(
    seed: int, groups: str, async_scheduling: bool
) -> None:
    options: dict[str, Any] = {"async_scheduling": async_scheduling, "groups": groups}
    stock = Engine(BLOCKS, connector=None, **options)
    ours = tiered(BLOCKS, 400, skips=False, config={"ttl_s": 1.0}, **options)
    pair = Pair(stock, ours, random.Random(100 + seed))
    pair.play(NUM_OPERATIONS)
    assert pair.answers[True, "done"] > 3
    assert pair.same_tokens()
    tiering.check(ours)
    outlast_pins(ours)
    tiering.assert_drained(ours)


@MODES
@SEEDS
@pytest.mark.parametrize("policy", ["stock", "fixed_ttl"])
def test_inside_a_multi_connector_a_reset_fails_where_it_does_without_us(
    seed: int, policy: str, async_scheduling: bool
) -> None:
    """There vLLM keeps its fence around blocks that a step in flight may write, as a partner may
    need it: to put back whoever runs amid such a step raises, with any connectors."""
    options = {"async_scheduling": async_scheduling}
    stock, ours = among(IDLE, IDLE, **options), among(ours_of(policy), IDLE, **options)
    pair = Pair(stock, ours, random.Random(200 + seed), has_fence=True)
    pair.play(NUM_OPERATIONS)
    if policy == "stock":
        assert {is_same for is_same, _ in pair.answers} == {True}
        assert stock.outputs == ours.outputs
    assert async_scheduling or not pair.answers[True, "raised"]
    assert pair.same_tokens()


def test_amid_an_asynchronous_step_vllms_own_multi_connector_raises_without_us() -> None:
    """Said in docs/decisions.md. Once the step is over, as after a pause, it is done."""
    for connectors in ((IDLE, IDLE), (ours_of("fixed_ttl"), IDLE)):
        engine = among(*connectors, async_scheduling=True)
        engine.add("a", 40, 8, program="p")
        engine.run_until_idle(until=lambda engine=engine: bool(engine.outputs["a"]))  # type: ignore[misc]
        while not engine._queue:
            engine.step()
        how = {"reset_running_requests": True, "reset_connector": True}
        assert answer(engine, how) == "raised"
        engine.run_until_idle()
        assert answer(engine, how) == "done"
