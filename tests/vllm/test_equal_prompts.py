"""Equal prompts share what their blocks share, and nothing more: neither several samples of one
prompt nor a client's words about them change what anybody else finds."""

from __future__ import annotations

from typing import Any

import pytest

from bench.common.known_costs import know
from continuum_connector.toolcalls import Asked, Ending
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import check, tiered, total

COSTS: dict[str, Any] = {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-6]}


def engine_of(num_blocks: int, num_slots: int, **more: Any) -> Engine:
    """To compute is slow, to load is not; every answer reads as a last one, unless its client names
    a tool."""
    options = {"max_num_batched_tokens": 4096, "config": {"policy": "adaptive"}} | more
    engine = tiered(num_blocks, num_slots, **options)
    know(engine.connector.costs, COSTS)
    engine.connector.side.decider._reader.read = lambda *_, **__: Asked(Ending.ANSWER)
    return engine


def turn_of(engine: Engine, agent: int, turn: int) -> None:
    """An agent's next turn, after which it runs a command."""
    name = f"a{agent}.{turn}"
    prompt = engine.next_prompt(f"a{agent}.{turn - 1}", 32, seed=turn) if turn else 320
    ran = {"this_func_call": "bash"}
    engine.add(name, prompt, 4, seed=agent + 1, program=f"agent{agent}", extra_args=ran)
    engine.run_until_idle()


def found(engine: Engine, since: int) -> int:
    """Tokens that the two agents' turns found, from that turn on."""
    turns = [name for name in engine.cached if name.startswith("a")]
    return sum(sum(engine.cached[each]) for each in turns if int(each.partition(".")[2]) >= since)


def beside_one_shots(num_samples: int, are_last: bool = False) -> Engine:
    """Two agents, and prompts that are sent so many times each and never come back. `are_last`:
    their clients name them, and say so."""
    engine = engine_of(60, 300)
    for turn in range(10):
        for agent in range(2):
            turn_of(engine, agent, turn)
        for number in range(6 * turn, 6 * turn + 6):
            for sample in range(num_samples):
                name = f"f{number}.{sample}"
                said = {"program": name, "final": True} if are_last else {}
                engine.add(name, 400, 2, seed=1000 + number, **said)
            engine.run_until_idle()
            engine.idle(2.0)
    check(engine)
    return engine


def test_agents_find_as_much_beside_prompts_that_are_sampled_four_times() -> None:
    one, four = beside_one_shots(1), beside_one_shots(4)
    assert found(one, 3) == found(four, 3) > 6000
    assert total(four, "dram_refused_blocks") == 0


def test_a_prompt_that_is_sampled_is_not_one_that_several_begin_with() -> None:
    one, four = beside_one_shots(1, are_last=True), beside_one_shots(4, are_last=True)
    assert found(one, 3) == found(four, 3) > 6000
    assert total(one, "stored_blocks") == total(four, "stored_blocks") > 0


@pytest.mark.parametrize("said", [{"group_size": 65_536}, {"group": "g", "group_size": 65_536}])
def test_who_says_that_many_samples_will_come_keeps_no_room_for_them(said: dict[str, Any]) -> None:
    def beside(words: dict[str, Any]) -> Engine:
        """Four clients that are over, then two agents whose contexts and what comes between do not
        fit VRAM together."""
        engine = engine_of(120, 90)
        for number in range(4):
            told = {"program": f"over{number}", "final": True, **words}
            params = {"continuum": told}
            engine.add(f"o{number}", 352, 2, seed=500 + number, kv_transfer_params=params)
            engine.run_until_idle()
        for turn in range(4):
            for agent in range(2):
                turn_of(engine, agent, turn)
                engine.idle(60.0)
                for number in range(2):
                    name = f"f{agent}.{turn}.{number}"
                    seed = 1000 + 10 * turn + 3 * agent + number
                    engine.add(name, 1500, 2, seed=seed, program=name, final=True)
                    engine.run_until_idle()
        return engine

    hog = beside(said)
    assert found(hog, 1) == found(beside({}), 1) > 2000
    receipts = hog.kv_transfer_params["o0"]["continuum"]["hints"]
    assert [each["hint"] for each in receipts] == ["final"], "a word that means nothing here"


def test_samples_of_a_prompt_lie_in_dram_once_and_find_it_there() -> None:
    engine = engine_of(80, 400, max_num_seqs=1)
    for number in range(3):
        engine.add(f"s{number}", 400, 4, seed=7, program=f"s{number}")
        engine.run_until_idle()
        for other in range(2):  # others sweep VRAM
            engine.add(f"x{number}.{other}", 900, 2, seed=50 + 2 * number + other)
            engine.run_until_idle()
    # A block is in DRAM once, whoever left it: 25 of the prompt, and 57 of each of the six others.
    assert [engine.cached[f"s{number}"] for number in range(3)] == [(0, 0), (0, 384), (0, 384)]
    assert engine.connector.side.tier.index.num_ready <= 25 + 6 * 57


# --- calls that are over at once ------------------------------------------------------------------
SHARED = 400  # tokens with which each of them begins: 25 blocks


def call(engine: Engine, name: str, number: int, **said: Any) -> None:
    """One call: what all begin with, then text of its own."""
    own = prompt(160, seed=900 + number)
    engine.add(name, prompt(SHARED, seed=7) + own, 4, **said)
    engine.run_until_idle()


def sweep(engine: Engine) -> None:
    """Others take all of VRAM."""
    for number in range(2):
        engine.add(f"x{len(engine.cached)}.{number}", 900, 2, seed=50 + number)
        engine.run_until_idle()


def num_stored(engine: Engine, program: str) -> int:
    """Blocks of DRAM that the program's chains claim, of those that do not leave before others."""
    order = engine.connector.side.tier.index.order
    live = [each for each in order if each in order.live_of(each.program)]
    return sum(len(each.tickets) for each in live if each.program.endswith(program))


def test_what_calls_that_are_over_at_once_begin_with_outlasts_vram() -> None:
    engine = engine_of(80, 400)
    for number in range(2):
        call(engine, f"s{number}", number, program=f"s{number}", final=True)
    sweep(engine)
    call(engine, "s2", 2, program="s2", final=True)
    # The first found nothing, so nothing says that others begin like it.
    assert [engine.cached[f"s{number}"] for number in range(3)] == [(0, 0), (400, 0), (0, 400)]
    # And nobody keeps what a call said alone.
    assert [num_stored(engine, f"s{number}") for number in range(3)] == [0, 25, 25]
    check(engine)


def test_a_last_call_without_a_name_leaves_what_it_shares() -> None:
    engine = engine_of(80, 400)
    for number in range(2):
        call(engine, f"s{number}", number, extra_args={"is_last_step": 1})
    sweep(engine)
    call(engine, "s2", 2)
    assert [engine.cached[f"s{number}"] for number in range(3)] == [(0, 0), (400, 0), (0, 400)]


def test_a_last_call_under_a_name_in_use_leaves_its_program_as_it_was() -> None:
    """Else 64 such calls would take the place of what the program's own turns left."""
    engine = engine_of(120, 400)
    turn_of(engine, 0, 0)
    before = num_stored(engine, "agent0")
    assert before
    call(engine, "s0", 0, program="other", final=True)
    for number in range(1, 4):
        call(engine, f"s{number}", number, program="agent0", final=True)
        assert engine.cached[f"s{number}"] == (400, 0)
    assert num_stored(engine, "agent0") == before
    check(engine)


@pytest.mark.parametrize("groups", ["full", "hybrid", "state"])
def test_of_windows_and_states_no_part_is_kept_that_no_turn_could_go_on_from(groups: str) -> None:
    engine = engine_of(200, 400, groups=groups)
    for number in range(3):
        call(engine, f"s{number}", number, program=f"s{number}", final=True)
    assert (total(engine, "stored_blocks") > 0) == (groups == "full")
    check(engine)
