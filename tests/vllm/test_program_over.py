"""A program ends without a turn of its own: an operator says so. What its turns left goes first,
nothing of anybody else's. A call by which a public agent says that it is done ends its own chain.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.common.known_costs import know
from continuum_connector.toolcalls import UNREAD, Asked, Ending
from tests.proofs import prove_claims
from tests.vllm.harness import Engine
from tests.vllm.machine_draws import COSTS
from tests.vllm.tiering import check, come_to_rest, on_disk, park, store_all, tiered, total


def end(engine: Engine, key: str) -> bool:
    """As program_endpoint.py asks each engine; whether it knew the program."""
    return not engine.scheduler.reset_prefix_cache(False, {"end_program": key})


def ours(policy: str = "fixed_ttl", **more: Any) -> Engine:
    engine = tiered(100, 60, config={"policy": policy}, **more)
    know(engine.connector.costs, COSTS["both"])
    return engine


def turn(engine: Engine, name: str, tokens: Any, program: str, **more: Any) -> None:
    engine.add(name, tokens, 6, program=program, **more)
    engine.run_until_idle()
    engine.idle(0.1)


def test_what_it_has_is_let_go_of_and_its_neighbour_keeps_all() -> None:
    engine = ours()
    for number in range(2):  # two contexts each
        turn(engine, f"b{number}", 160, "b", seed=10 + number)
        turn(engine, f"a{number}", 160, "a", seed=number)
    side = engine.connector.side
    cached = len(engine.pool.cached_block_hash_to_block)
    assert end(engine, "job:a")
    assert not side.pins.of("job:a")
    assert len(side.pins.of("job:b")) == 2
    assert total(engine, "pins_ended", "program_done") == 2
    assert [side.tier.index.chains_of(f"job:{each}") == [] for each in "ab"] == [True, False]
    assert len(engine.pool.cached_block_hash_to_block) == cached  # nothing was reset
    assert total(engine, "epochs") == 0
    check(engine)
    for each in range(4):  # DRAM has 60 slots: what ended leaves first, though it was used last
        turn(engine, f"c{each}", 150, "c", seed=20 + each)
    engine.idle(600)
    turn(engine, "flood", 95 * 16, "flood", seed=99, final=True)
    for number in range(2):
        turn(engine, f"back{number}", engine.next_prompt(f"b{number}", 16), "b")
        assert sum(engine.cached[f"back{number}"]) >= 160


def test_a_disk_lets_it_leave_first_too() -> None:
    engine = on_disk(num_slots=60)
    turn(engine, "a", 160, "a", seed=1)
    turn(engine, "b", 160, "b", seed=2)
    park(engine)
    come_to_rest(engine)
    disk = engine.connector.side.tier.below.index
    assert disk.num_ready == 20
    assert set(disk.shelves.claims.of) == {"job:a", "job:b"}
    assert end(engine, "job:a")
    assert set(disk.shelves.claims.of) == {"job:b"}
    prove_claims(disk.shelves.claims)


def test_an_unknown_one_changes_nothing() -> None:
    engine = ours()
    turn(engine, "a", 160, "a")
    assert not end(engine, "a")
    assert not end(engine, "job:b")
    assert len(engine.connector.side.pins) == 1


def test_a_turn_under_way_is_its_last() -> None:
    engine = ours()
    turn(engine, "a0", 160, "a")
    engine.add("a1", engine.next_prompt("a0", 16), 20, program="a")
    engine.step()
    engine.step()
    assert end(engine, "job:a")
    engine.run_until_idle()
    assert engine.kv_transfer_params["a1"]["continuum"]["decision"] == "free"
    assert len(engine.outputs["a1"]) == 20
    check(engine)


def test_a_turn_that_waits_keeps_its_pin() -> None:
    engine = ours()
    turn(engine, "a0", 160, "a")
    engine.add("a1", engine.next_prompt("a0", 16), 6, program="a")
    assert end(engine, "job:a")
    assert len(engine.connector.side.pins) == 1
    engine.run_until_idle()
    assert engine.cached["a1"][0] >= 160
    assert not engine.connector.side.pins
    check(engine)


def test_the_name_begins_anew() -> None:
    engine = ours()
    turn(engine, "a0", 160, "a")
    turn(engine, "a1", engine.next_prompt("a0", 16), "a")
    assert end(engine, "job:a")
    turn(engine, "a2", 100, "a", seed=5)
    told = engine.kv_transfer_params["a2"]["continuum"]
    assert (told["turn"], told["decision"]) == (1, "pin")


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "stored"])
def test_what_was_decided_has_one_outcome(is_pinned: bool) -> None:
    engine = ours()
    if not is_pinned:
        store_all(engine)
    turn(engine, "a0", 160, "a")
    for _ in range(2):  # to end it again is no harm
        assert end(engine, "job:a")
        assert total(engine, "outcomes", "pin_never" if is_pinned else "offload_never") == 1
    engine.idle(2000)
    engine.connector.shutdown()
    assert total(engine, "decisions") == total(engine, "outcomes") == 1


def test_a_server_that_steps_aside_or_is_switched_off_resets_nothing() -> None:
    engine = ours()
    turn(engine, "a", 160, "a")
    cached = len(engine.pool.cached_block_hash_to_block)
    engine.scheduler._continuum = None
    assert not end(engine, "job:a")
    assert len(engine.pool.cached_block_hash_to_block) == cached


# --- the agent's own last call -----------------------------------------------------------------
def answers(engine: Engine, ending: Ending) -> None:
    engine.connector.side.decider._reader.read = lambda *_, **__: Asked(ending)


@pytest.mark.parametrize("policy", ["fixed_ttl", "adaptive"])
def test_a_last_call_ends_its_own_chain_alone(policy: str) -> None:
    engine = ours(policy)
    engine.connector.side.decider.policy.reads = True  # fixed_ttl reads nothing
    answers(engine, Ending.CALLS)
    turn(engine, "main", 160, "a", seed=1)
    turn(engine, "side", 160, "a", seed=2)
    answers(engine, Ending.LAST)
    turn(engine, "side2", engine.next_prompt("side", 16), "a")
    told = engine.kv_transfer_params["side2"]["continuum"]
    assert (told["decision"], "hints" in told) == ("free", False)
    assert total(engine, "outcomes", "free_done") == 1
    side = engine.connector.side
    assert len(side.pins.of("job:a")) == 1
    assert side.decider.away.forecast_of("job:a") is not None  # main is still expected
    answers(engine, Ending.CALLS)
    turn(engine, "main2", engine.next_prompt("main", 16), "a")
    told = engine.kv_transfer_params["main2"]["continuum"]
    assert (told["turn"], told["decision"]) == (4, "pin")  # the name did not begin anew
    assert total(engine, "pins_ended", "returned") == 2
    check(engine)


def test_in_dram_what_it_continues_leaves_first_and_nothing_else() -> None:
    engine = ours()
    store_all(engine)
    engine.connector.side.decider.policy.reads = True
    answers(engine, Ending.CALLS)
    turn(engine, "main", 160, "a", seed=1)
    turn(engine, "side", 160, "a", seed=2)
    index = engine.connector.side.tier.index
    main, side = index.chains_of("job:a")
    answers(engine, Ending.LAST)
    turn(engine, "side2", engine.next_prompt("side", 16), "a")
    assert list(index.chains_of("job:a")) == [main]
    assert len(side.tickets)  # it is there still, until its room is wanted


def test_a_client_that_says_more_will_come_is_believed() -> None:
    engine = ours("adaptive")
    answers(engine, Ending.LAST)
    turn(engine, "a", 160, "a", final=False)
    assert engine.kv_transfer_params["a"]["continuum"]["decision"] != "free"
    assert total(engine, "endings", UNREAD.ending.value) == 1
