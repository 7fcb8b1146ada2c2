"""A model with states in the lab: what vLLM's own hybrid coordinator keeps, and its connectors."""

from __future__ import annotations

import math
import operator

import msgspec
import pytest

from bench.common.plans import ProgramPlan, Streams, Talk, Workload
from bench.sim.arms import ARMS
from bench.sim.hardware import Machine, machine
from bench.sim.job import RunRecord
from bench.sim.lab import Lab
from bench.tests.vllm.lab import assert_lets_go, play

MODEL, BLOCK, NUM_STATES = "qwen3-next-80b-fp8", 544, 3
TURNS = ((5_000, 100), (700, 100), (2_000, 30), (2_000, 30))  # tokens asked and answered
KEEPS = ("stock", "infinite", "simple", "offloading")


def workload(num_programs: int = 3) -> Workload:
    """Programs that have nothing in common and come back after three seconds."""
    streams, programs = Streams(), []
    for number in range(num_programs):
        talk = Talk(streams)
        for num_new, num_answer in TURNS:
            talk.turn(num_new, num_answer, gap_s=3.0 if talk.num_turns else 0.0)
        programs.append(ProgramPlan(f"p{number}", talk.turns(), arrival_s=0.3 * number))
    return Workload("three", tuple(programs))


def on(model: str = MODEL, num_blocks: int = 400) -> Machine:
    return machine("H200", model, kv_tokens=num_blocks * BLOCK, dram_gb=20)


def known(record: RunRecord) -> dict[str, list[int]]:
    """Tokens of each program's prompts that were found, in VRAM or DRAM."""
    found: dict[str, list[int]] = {}
    for each in sorted(record.turns, key=lambda turn: (turn.program, turn.index)):
        found.setdefault(each.program, []).append(each.num_local + each.num_external)
    return found


def expected(num_dropped: int = 0) -> list[int]:
    """The prompt before, down to the block's end that has a state; the answer to it is lost."""
    prompts = [plan.num_prompt_tokens for plan in workload(1).programs[0].turns]
    return [0, *(((prompt - 1) // BLOCK - num_dropped) * BLOCK for prompt in prompts[:-1])]


@pytest.mark.parametrize("arm", KEEPS)
def test_a_turn_finds_the_prompt_before_it_down_to_a_state(arm: str) -> None:
    """VRAM holds one program at a time with the connectors, whose DRAM has the rest."""
    small = arm not in ("stock", "infinite")
    record = play(arm, workload(), on(num_blocks=40 if small else 400))
    assert known(record) == dict.fromkeys(("p0", "p1", "p2"), expected())
    assert (record.num_external_tokens > record.num_local_tokens) == small


@pytest.mark.parametrize("arm", ["stock", "simple", "offloading"])
def test_a_draft_layer_costs_every_turn_a_block_more(arm: str) -> None:
    small = arm != "stock"
    record = play(arm, workload(), on(f"{MODEL}-mtp", num_blocks=44 if small else 400))
    assert known(record) == dict.fromkeys(("p0", "p1", "p2"), expected(num_dropped=1))


@pytest.mark.parametrize("arm", ["simple", "offloading"])
def test_a_load_brings_a_state_of_every_group_besides_the_blocks(arm: str) -> None:
    record = play(arm, workload(), on(num_blocks=40))
    num_loads = sum(turn.num_external > 0 for turn in record.turns)
    num_blocks = record.num_external_tokens // BLOCK + NUM_STATES * num_loads
    assert num_loads == 9
    assert record.loaded_bytes == num_blocks * 544 * 24_576


def test_turns_that_wait_do_not_cost_those_that_run_their_states() -> None:
    """Eight programs in the room of two, whose turns are all stored."""
    record = play("lru_offload", workload(8), on(num_blocks=40))
    found = known(record)
    assert len(found) == 8
    for each in found.values():
        assert all(map(operator.ge, each, expected()))  # more where a block ended in the answer


@pytest.mark.parametrize("arm", ["stock", "simple", "adaptive"])
def test_a_run_repeats_exactly_in_a_process_that_ran_others(arm: str) -> None:
    """vLLM completes a model's config once; a server that finds it completed has no states."""
    first, again = (play(arm, workload(), on(num_blocks=40)) for _ in range(2))
    assert msgspec.structs.replace(first, wall_s=again.wall_s) == again


@pytest.mark.parametrize("arm", ["simple", "offloading", "adaptive"])
def test_an_arm_lets_go_of_every_block_of_every_group(arm: str) -> None:
    lab = Lab(on(num_blocks=40), ARMS[arm], workload())
    lab.play()
    assert_lets_go(lab)
    assert math.isinf(lab.engine.worker.next_done())
