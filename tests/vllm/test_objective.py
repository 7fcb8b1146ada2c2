"""`objective = throughput` in vLLM's own loop: programs by arrival, for as long as it takes.

THE BOUND. A turn waits for turns of programs that came before its own or whose KV is pinned, and
for nobody else's; so of a batch everyone ends. Where the older ones never end, it stands as if it
had come a week before it did.
"""

from __future__ import annotations

import random

import pytest

from tests.vllm.agents import AgentEngine

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def engine_of(objective: str = "throughput", **kwargs: object) -> AgentEngine:
    extra = {"ttl_s": 30, "objective": objective, "max_head_start_s": 10, "policy": "fixed_ttl"}
    options: dict[str, object] = {"num_blocks": 200, "max_num_seqs": 1, **kwargs}
    return AgentEngine(extra_config=extra, **options)  # type: ignore[arg-type]


def busy(engine: AgentEngine) -> None:
    """Occupy the only place, so that what comes now waits."""
    engine.add("busy", 20, 60, seed=999, program="busy", final=True)
    engine.steps(3)


def played(objective: str, seconds: float, **kwargs: object) -> list[str]:
    """An old program comes back after so long, when a young one waits already; who was served."""
    engine = engine_of(objective, **kwargs)
    engine.run_turn("old1", 100, program="old", seed=1)
    engine.reset_prefix_cache()
    engine.clock.advance(5.0)
    busy(engine)
    engine.add("young1", 100, 4, program="young", seed=2)
    engine.clock.advance(seconds)
    engine.add("old2", engine.next_prompt("old1", 20), 4, program="old")
    engine.run_until_idle()
    return engine.admissions[-2:]


@MODES
def test_no_clock_lets_a_younger_program_pass(async_scheduling: bool) -> None:
    assert played("throughput", 600.0, async_scheduling=async_scheduling) == ["old2", "young1"]
    assert played("latency", 600.0, async_scheduling=async_scheduling) == ["young1", "old2"]
    assert played("latency", 1.0, async_scheduling=async_scheduling) == ["old2", "young1"]


def test_whose_kv_is_pinned_goes_first_as_ever() -> None:
    engine = engine_of()
    engine.run_turn("old1", 100, program="old", seed=1)
    engine.reset_prefix_cache()
    engine.add("young1", 100, program="young", seed=2)
    engine.run_until_idle(until=lambda: "young1" in engine.finish_reasons)
    assert engine.num_pins() == 1
    busy(engine)
    engine.add("young2", engine.next_prompt("young1", 20), 4, program="young")
    engine.add("old2", engine.next_prompt("old1", 20), 4, program="old")
    engine.run_until_idle()
    assert engine.admissions[-2:] == ["young2", "old2"]


def test_samples_of_a_prompt_stand_together_where_the_first_of_them_came() -> None:
    engine = engine_of()
    busy(engine)
    for n, prompt in enumerate((1, 2, 1, 2, 1)):
        engine.clock.advance(0.1)
        engine.add(f"p{prompt}.{n}", 200, 4, seed=prompt, program=f"sample{n}")
    engine.run_until_idle()
    assert engine.admissions[-5:] == ["p1.0", "p1.2", "p1.4", "p2.1", "p2.3"]


@pytest.mark.parametrize("seed", range(3))
def test_of_a_batch_that_does_not_fit_everyone_ends(seed: int) -> None:
    """Twelve trajectories of up to five turns in VRAM for two, that come back at random."""
    rng = random.Random(seed)
    engine = engine_of(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=256)
    left = {f"p{n}": rng.randint(1, 5) for n in range(12)}
    turns = dict.fromkeys(left, 0)
    due = {name: rng.randint(0, 20) for name in left}
    for step in range(4000):
        for name in [each for each, at in due.items() if at <= step]:
            del due[name]
            before = f"{name}.{turns[name] - 1}"
            prompt = engine.next_prompt(before, 40) if turns[name] else 100
            answer, is_last = rng.randint(2, 20), left[name] == 1
            engine.add(f"{name}.{turns[name]}", prompt, answer, program=name, final=is_last)
        engine.step()
        for name in left:
            if f"{name}.{turns[name]}" in engine.finish_reasons:
                turns[name], left[name] = turns[name] + 1, left[name] - 1
                if left[name]:
                    due[name] = step + rng.randint(1, 30)
        if not any(left.values()):
            break
    assert not any(left.values())
