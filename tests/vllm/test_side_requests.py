"""Law 8: a turn takes nothing from a chain that it does not continue.

Clients put several contexts under one id: titles and summaries, forks, the conversations of an
application. With its id each finds no less than without, and all together no less than in stock
vLLM: in VRAM alone, with DRAM, and with a disk below it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from bench.common.known_costs import know
from continuum_connector.programs.program import MAX_LEFT, MAX_RESTING, OVER_S
from continuum_connector.scheduler.tiers.chains import MAX_BRANCHES
from continuum_connector.scheduler.turns import MAX_HELD, PinEnd
from continuum_connector.toolcalls import Asked, Ending
from tests.vllm.harness import Engine, prompt
from tests.vllm.machine_draws import COSTS
from tests.vllm.tiering import check, on_disk, tiered

Name = Callable[[str], str | None]  # what a client calls each of its contexts

POLICIES = pytest.mark.parametrize("policy", ["adaptive", "fixed_ttl"])


def itself(context: str) -> str | None:
    return context


def nothing(_: str) -> str | None:
    return None


def one_id(_: str) -> str | None:
    return "app"


def stock(num_blocks: int) -> Engine:
    return Engine(num_blocks, connector=None)


def ours(num_blocks: int, num_slots: int, policy: str = "adaptive", **more: Any) -> Engine:
    """To compute is slow; every answer reads as a last one."""
    engine = tiered(num_blocks, num_slots, config={"policy": policy}, **more)
    know(engine.connector.costs, COSTS["both"])
    engine.connector.side.decider._reader.read = lambda *_, **__: Asked(Ending.ANSWER)
    return engine


def later(engine: Engine, seconds: float) -> None:
    if engine.connector is None:
        engine.clock.advance(seconds)
    else:
        engine.idle(seconds)


def turn(engine: Engine, name: str, tokens: list[int], program: str | None, **more: Any) -> int:
    """A turn runs to its end; returns how many of its tokens were found."""
    engine.add(name, tokens, 6, program=program, **more)
    engine.run_until_idle()
    return sum(engine.cached[name])


# --- a side request between two turns of an agent -------------------------------------------
def agent(engine: Engine, named: Name, with_side: bool, num_rounds: int = 6) -> list[int]:
    """What an agent's turns after the first find, with a request for a title, a topic or a summary
    before each under the agent's own id, and with others' turns between."""
    found, history = [], prompt(300, seed=1)
    for number in range(num_rounds):
        found.append(turn(engine, f"m{number}", history, named("agent")))
        history = list(engine.requests[f"m{number}"].all_token_ids)
        later(engine, 0.1)
        if with_side:
            turn(engine, f"s{number}", prompt(70, seed=40 + number), named("agent"))
        later(engine, 0.1)
        for other in range(3):
            name = f"o{number}.{other}"
            turn(engine, name, prompt(280, seed=100 + 10 * number + other), named(name))
            later(engine, 0.2)
        history += prompt(15, seed=500 + number)
    if engine.connector is not None:
        check(engine)
    return found[1:]


@POLICIES
@pytest.mark.parametrize("num_slots", [60, 30, 0], ids=["dram", "little", "vram"])
def test_a_side_request_takes_nothing_from_its_agent(policy: str, num_slots: int) -> None:
    named = agent(ours(70, num_slots, policy), itself, True)
    unnamed = agent(ours(70, num_slots, policy), nothing, True)
    alone = agent(stock(70), nothing, True)
    assert sum(named) >= sum(unnamed)
    assert all(here >= there for here, there in zip(named, alone, strict=True))
    if policy == "fixed_ttl":  # which does not weigh the agent against the others
        assert named == agent(ours(70, num_slots, policy), itself, False)


# --- several conversations under one id -----------------------------------------------------
def strangers(engine: Engine, number: int, num: int) -> None:
    """Questions of nobody, each asked once."""
    for each in range(num):
        turn(engine, f"f{number}.{each}", prompt(190, seed=1000 + 20 * number + each), None)
        later(engine, 0.5)


def conversations(engine: Engine, named: Name, num: int = 6) -> int:
    """What the turns of conversations that take turns find, beside questions of nobody."""
    found = 0
    for number in range(4):
        for each in range(num):
            name, before = f"c{each}.{number}", f"c{each}.{number - 1}"
            tokens = engine.next_prompt(before, 32) if number else prompt(320, seed=each + 1)
            found += turn(engine, name, tokens, named(f"c{each}"))
            later(engine, 2.0)
        strangers(engine, number, 8)
    if engine.connector is not None:
        check(engine)
    return found


def a_new_id() -> Name:
    """What a client sends that makes an id per request."""
    ids = itertools.count()
    return lambda _: f"request-{next(ids)}"


@pytest.mark.parametrize("num_slots", [200, 0], ids=["dram", "vram"])
def test_a_new_id_for_each_request_costs_no_more_than_until_it_is_seen(num_slots: int) -> None:
    """That takes three turns that find nothing under their new ids, and what they leave."""
    unnamed = conversations(ours(70, num_slots), nothing)
    assert 0 < 0.6 * unnamed < conversations(ours(70, num_slots), a_new_id())


@pytest.mark.parametrize("num_slots", [200, 0], ids=["dram", "vram"])
def test_conversations_under_one_id_find_what_they_find_without(num_slots: int) -> None:
    shared = conversations(ours(60, num_slots), one_id)
    assert shared >= conversations(ours(60, num_slots), nothing)
    assert shared >= conversations(stock(60), nothing)
    if num_slots:
        assert shared > 4500


@pytest.mark.parametrize("num_slots", [400, 0], ids=["dram", "vram"])
def test_a_conversation_takes_nothing_from_one_that_begins_alike(num_slots: int) -> None:
    """The question fills no block, so by blocks each goes on from the end of another's prompt."""
    engine, system = ours(400, num_slots), prompt(160)
    turn(engine, "before", system + prompt(60, seed=9), "other")
    for number in (1, 2, 3):
        asked = system + prompt(12 + 20 * (number % 2), seed=number)
        engine.add(f"c{number}", asked, 200, program="app")
        engine.run_until_idle()
    side = engine.connector.side
    if num_slots:
        assert len(side.tier.index.chains_of("job:app")) == 3
    else:
        assert [pin.rank[0] > 0 for pin in side.pins.of("job:app")] == [True] * 3
    assert len(side.programs.get("job:app").left) == 3


def test_a_client_that_writes_answers_anew_is_known_by_the_end_of_its_last_prompt() -> None:
    """Even if another program has begun as it does."""
    engine, asked = ours(400, 0), prompt(200)
    turn(engine, "before", asked + prompt(60, seed=9), "other")
    for number in range(4):
        engine.add(f"a{number}", asked, 60, program="app")
        engine.run_until_idle()
        asked = asked + prompt(60, seed=100 + number)
    side = engine.connector.side
    assert len(side.programs.get("job:app").left) == 1
    assert len(side.pins.of("job:app")) == 1, "each turn took over its last one's pin"


SYSTEM = prompt(320, seed=77)


def under_one_system_prompt(engine: Engine, named: Name, num_rounds: int = 6) -> list[int]:
    """What conversations find that take turns, in each round: most of each is a system prompt."""
    found: list[int] = []
    for number in range(num_rounds):
        found.append(0)
        for each in range(8):
            name, asked = f"c{each}.{number}", SYSTEM + prompt(60, seed=100 + each)
            if number:
                asked = engine.next_prompt(f"c{each}.{number - 1}", 60)
            engine.add(name, asked, 60, program=named(f"c{each}"))
            engine.run_until_idle()
            found[-1] += sum(engine.cached[name])
            later(engine, 2.0)
        strangers(engine, number, 4)
    if engine.connector is not None:
        check(engine)
    return found


@pytest.mark.parametrize("num_slots", [120, 60, 0], ids=["dram", "little", "vram"])
def test_conversations_under_one_long_system_prompt_are_told_apart_in_the_end(
    num_slots: int,
) -> None:
    """A first turn looks like an edit of another conversation's; then that is continued after
    all."""
    shared = under_one_system_prompt(ours(120, num_slots), one_id)
    own = under_one_system_prompt(ours(120, num_slots), itself)
    assert sum(shared) >= 0.95 * sum(own)
    assert sum(shared[3:]) >= 0.95 * sum(own[3:])
    assert sum(shared) >= 1.2 * sum(under_one_system_prompt(stock(120), nothing))


def known(engine: Engine) -> tuple[int, int, bool]:
    program = engine.connector.side.programs.get("job:app")
    return len(program.left), len(program.edited), program.begin_alike


def call(engine: Engine) -> Callable[[], list[int]]:
    """Every answer calls a tool; returns what gives its pauses that have been learned."""
    calls, decider = Asked(Ending.CALLS, ("run",)), engine.connector.side.decider
    decider._reader.read = lambda *_, **__: calls
    return lambda: [round(gap) for gap in decider.gaps.recorded(calls)[0]]


def test_once_what_was_edited_is_continued_its_id_edits_nothing() -> None:
    engine = ours(400, 0)
    under_one_system_prompt(engine, one_id, num_rounds=1)
    assert known(engine) == (1, 7, False)
    turn(engine, "on", engine.next_prompt("c0.0", 60), "app")
    assert known(engine) == (2, 6, True)
    turn(engine, "new", SYSTEM + prompt(60, seed=9), "app")
    assert known(engine) == (3, 6, True)
    turn(engine, "too", engine.next_prompt("c1.0", 60), "app")
    assert known(engine) == (4, 5, True)


def test_of_first_turns_at_once_none_is_lost_that_was_taken_for_edited() -> None:
    engine = ours(400, 0)
    turn(engine, "c0", SYSTEM + prompt(60, seed=1), "app")
    for number in (1, 2):
        engine.add(f"c{number}", SYSTEM + prompt(60, seed=1 + number), 6, program="app")
    engine.run_until_idle()
    assert known(engine) == (2, 1, False)
    turn(engine, "c2.1", engine.next_prompt("c2", 20), "app")
    turn(engine, "c0.1", engine.next_prompt("c0", 20), "app")
    assert known(engine) == (3, 0, True)


def test_a_context_that_was_asked_for_twice_after_its_edit_is_edited_again() -> None:
    engine = ours(400, 0)
    turn(engine, "long", SYSTEM + prompt(200, seed=1), "app")
    for name in ("once", "again"):
        engine.add(name, SYSTEM + prompt(60, seed=2), 6, program="app")
    engine.run_until_idle()
    turn(engine, "on", engine.next_prompt("once", 40), "app")
    turn(engine, "short", SYSTEM + prompt(60, seed=3), "app")
    assert known(engine) == (2, 2, False)


def test_a_short_request_with_the_agents_system_prompt_says_nothing_of_its_edits() -> None:
    """Its prompt ends within what they begin with, so by blocks each goes on from there."""
    engine = ours(400, 0)
    turn(engine, "title", SYSTEM + prompt(20, seed=1), "app")
    turn(engine, "task", SYSTEM + prompt(60, seed=2), "app")
    turn(engine, "on", engine.next_prompt("task", 40), "app")
    turn(engine, "short", SYSTEM + prompt(80, seed=5), "app")
    assert known(engine) == (1, 2, False)


@pytest.mark.parametrize("is_edit", [True, False], ids=["edited", "another"])
def test_the_pause_before_an_edit_is_learned_once_a_turn_shows_which_it_was(is_edit: bool) -> None:
    engine = ours(400, 0)
    recorded = call(engine)
    turn(engine, "before", SYSTEM + prompt(60, seed=8), "other")
    turn(engine, "first", SYSTEM + prompt(60, seed=1), "app")
    later(engine, 3.0)
    turn(engine, "second", SYSTEM + prompt(60, seed=2), "app")
    assert recorded() == []
    later(engine, 4.0)
    turn(engine, "third", engine.next_prompt("second" if is_edit else "first", 20), "app")
    assert recorded() == ([3, 4] if is_edit else [7])


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "own"])
def test_an_agent_that_edits_its_context_in_each_turn_teaches_its_pauses(is_shared: bool) -> None:
    engine = ours(400, 0)
    recorded, num_turns = call(engine), MAX_HELD + 6
    turn(engine, "before", SYSTEM + prompt(60, seed=8), "other" if is_shared else "app")
    later(engine, 3.0)
    for number in range(num_turns):
        turn(engine, f"t{number}", SYSTEM + prompt(60, seed=100 + number), "app")
        later(engine, 3.0)
    assert len(recorded()) >= num_turns - 1 - MAX_HELD
    engine.connector.side.end_program("job:app", engine.clock())
    assert recorded() == [3] * (num_turns - is_shared)
    assert not engine.connector.side.decider.away._held


def test_two_conversations_whose_turns_end_at_once_are_both_known() -> None:
    engine = ours(400, 0)
    for number in (1, 2):
        engine.add(f"c{number}", prompt(100, seed=number), 8, program="app")
    engine.run_until_idle()
    assert len(engine.connector.side.programs.get("job:app").left) == 2


def graph(engine: Engine, named: Name, num_workers: int) -> int:
    """What an agent finds that maps over documents, twice, with a worker for each."""
    found, history = 0, prompt(400, seed=1)
    for number in range(3):
        found += turn(engine, f"m{number}", history, named("agent"))
        for each in range(num_workers):
            later(engine, 0.5)
            name = f"w{number}.{each}"
            turn(engine, name, prompt(90, seed=1000 * (number + 1) + each), named(name))
        later(engine, 0.5)
        history = engine.next_prompt(f"m{number}", 15)
    check(engine)
    return found


def test_an_agent_that_waits_for_many_workers_under_its_id_finds_what_it_finds_without() -> None:
    """More than the chains of a program that are looked at."""
    num_workers = MAX_BRANCHES + 6
    shared = graph(ours(70, 200), one_id, num_workers)
    assert shared >= graph(ours(70, 200), nothing, num_workers) > 0


@pytest.mark.parametrize("named", [itself, one_id], ids=["own", "shared"])
def test_the_pin_of_an_agent_that_waits_for_many_workers_stays(named: Name) -> None:
    engine = tiered(800, 0, config={"policy": "fixed_ttl", "ttl_s": 60, "max_pinned_fraction": 0.9})
    turn(engine, "m0", prompt(400, seed=1), named("agent"))
    for each in range(MAX_LEFT + 6):
        later(engine, 0.1)
        turn(engine, f"w{each}", prompt(90, seed=1000 + each), named(f"w{each}"))
    for each in range(8):  # which take all that is free
        turn(engine, f"f{each}", prompt(900, seed=5000 + each), None, final=True)
    assert turn(engine, "m1", engine.next_prompt("m0", 15), named("agent")) == 400
    check(engine)


def test_what_an_id_left_that_is_always_busy_gives_way_to_others() -> None:
    """All that its turns left but the newest is known no more, and leaves by its own last use."""
    engine = ours(70, 500)
    for each in range(MAX_LEFT + 20):
        later(engine, 0.5)
        turn(engine, f"w{each}", prompt(60, seed=1000 + each), "app")
    engine.add("busy", prompt(40, seed=7), 2000, program="app")
    for _ in range(3):
        engine.step()
    tier, now = engine.connector.side.tier, engine.clock()
    order, rank = tier.index.order, tier.rank_at(now)
    known = order.current("job:app")
    let_be = [rank(each.program, each.last_used) for each in order if each not in known]
    assert len(let_be) > 10
    assert max(let_be) < -0.5 * MAX_LEFT, "seconds that the youngest of them is old"


def test_a_last_turn_says_nothing_of_the_other_conversations_of_a_busy_id() -> None:
    engine = ours(200, 200)
    for each in range(5):
        turn(engine, f"w{each}", prompt(60, seed=1000 + each), "app")
        later(engine, 1.0)
    engine.add("busy", prompt(40, seed=7), 2000, program="app")
    for _ in range(3):
        engine.step()
    away = engine.connector.side.decider.away
    others = list(engine.connector.side.programs.get("job:app").left)[:4]
    engine.add("last", engine.next_prompt("w4", 20), 3, program="app", final=True)
    engine.run_until_idle(until=lambda: "last" in engine.finish_reasons)
    assert len(others) == 4
    assert all(away.forecast_since("job:app", at) for at in others)


def test_conversations_under_one_id_find_on_disk_what_they_find_without() -> None:
    def beside(named: Name) -> int:
        engine = on_disk(60, 60, 300, config={"policy": "fixed_ttl", "disk_write_budget": 0})
        return conversations(engine, named, num=4)

    assert beside(one_id) >= 0.98 * beside(nothing) > 1000


def test_two_conversations_that_alternate_under_one_id_find_no_less_than_in_stock() -> None:
    def alternating(engine: Engine, named: Name) -> list[int]:
        found, histories = [], [prompt(280, seed=1), prompt(280, seed=2)]
        for number in range(8):
            which = number % 2
            name = f"t{number}"
            found.append(turn(engine, name, histories[which], named(name)))
            histories[which] = engine.next_prompt(name, 16)
            later(engine, 0.3)
            turn(engine, f"o{number}", prompt(260, seed=90 + number), None)
            later(engine, 0.3)
        return found[2:]

    there = alternating(stock(60), nothing)
    for num_slots in (60, 0):
        here = alternating(ours(60, num_slots), one_id)
        assert sum(here) >= sum(there)


# --- forks and compactions -----------------------------------------------------------------
@POLICIES
def test_of_two_forks_neither_takes_the_others_branch(policy: str) -> None:
    """Both continue one history, under one id, one after the other and then in turn."""
    engine = ours(80, 400, policy)
    turn(engine, "root", prompt(320, seed=1), "p")
    root = list(engine.requests["root"].all_token_ids)
    for name, seed in (("a", 7), ("b", 8)):
        turn(engine, f"{name}0", root + prompt(96, seed=seed), "p")
    found = []
    for number in range(1, 4):
        for name in "ab":
            for other in range(2):  # others sweep VRAM
                seed = 1000 + 20 * number + 2 * ord(name) + other
                turn(engine, f"o{name}{number}.{other}", prompt(600, seed=seed), None)
            later(engine, 0.5)
            before = f"{name}{number - 1}"
            length = len(engine.requests[before].all_token_ids)
            tokens = engine.next_prompt(before, 32)
            found.append((turn(engine, f"{name}{number}", tokens, "p"), length // 16 * 16))
    assert all(hit >= kept - 16 for hit, kept in found), found


def test_a_history_that_is_condensed_leaves_dram_in_the_end_and_others_first_nothing() -> None:
    """After a compaction the old history ranks by its own last use, not by its program's."""
    engine = ours(60, 60, "fixed_ttl")
    turn(engine, "long", prompt(480, seed=1), "p")  # 30 blocks
    history = prompt(64, seed=2)
    for number in range(3):
        turn(engine, f"short{number}", history, "p")
        history = engine.next_prompt(f"short{number}", 16)
    later(engine, 3.0)
    turn(engine, "other", prompt(400, seed=3), "q")  # 25 blocks: the old history makes room
    later(engine, 3.0)
    for number in range(3):
        turn(engine, f"f{number}", prompt(600, seed=50 + number), None, final=True)
    assert turn(engine, "short3", history, "p") >= 96
    assert turn(engine, "other2", engine.next_prompt("other", 16), "q") >= 384
    check(engine)


def test_what_a_client_never_keeps_gives_way_before_what_others_left() -> None:
    """Its requests end in a message that the next one lacks, so no turn takes such a pin over."""
    engine = ours(100, 0)
    begin = prompt(320, seed=1)
    turn(engine, "a0", begin + prompt(96, seed=7), "agent")
    turn(engine, "other", prompt(200, seed=2), "other")
    turn(engine, "a1", begin + prompt(16, seed=3) + prompt(96, seed=8), "agent")
    assert engine.cached["a1"][0] == 320
    old, *others = engine.connector.side.pins
    turn(engine, "new", prompt(930, seed=4), None, final=True)
    assert old.ended is PinEnd.PRESSURE
    assert list(engine.connector.side.pins) == others
    check(engine)


def test_a_last_turn_ends_its_own_conversation_alone() -> None:
    """Of two conversations under one id one says that it is over."""
    engine = ours(60, 60, "fixed_ttl")
    turn(engine, "a", prompt(320, seed=1), "app")
    turn(engine, "b", prompt(320, seed=2), "app")
    turn(engine, "b2", engine.next_prompt("b", 16), "app", final=True)
    later(engine, 3.0)
    for number in range(2):
        turn(engine, f"f{number}", prompt(300, seed=50 + number), f"f{number}")  # 19 blocks each
        later(engine, 3.0)
    assert turn(engine, "a2", engine.next_prompt("a", 16), "app") >= 304
    turn(engine, "b3", engine.next_prompt("b2", 16), "app")
    assert engine.cached["b3"][1] <= 32, "it left DRAM first"


def test_a_last_call_that_only_begins_as_an_agent_does_leaves_it_as_it_was() -> None:
    """Most of the agent's context is a system prompt, which the call under its id has as well."""
    engine = ours(300, 0)
    turn(engine, "a0", prompt(320) + prompt(60, seed=1), "app")
    turn(engine, "a1", engine.next_prompt("a0", 20), "app")
    turn(engine, "call", prompt(320) + prompt(60, seed=2), "app", final=True)
    [hint] = engine.kv_transfer_params["call"]["continuum"]["hints"]
    assert hint["outcome"] == "refused"
    turn(engine, "a2", engine.next_prompt("a1", 20), "app", final=True)
    told = engine.kv_transfer_params["a2"]["continuum"]
    assert (told["turn"], told["hints"][0]["outcome"]) == (4, "accepted")


# --- how many contexts of a program are remembered --------------------------------------------
@pytest.mark.parametrize("ends_by", ["silence", "final", "final beside another"])
def test_a_program_that_is_over_keeps_its_newest_contexts(ends_by: str) -> None:
    engine = ours(200, 200)
    for number in range(MAX_RESTING + 3):
        turn(engine, f"side{number}", prompt(70, seed=number), "app")
    program = engine.connector.side.programs.get("job:app")
    assert len(program.left) == MAX_RESTING + 3
    if ends_by == "silence":
        engine.clock.advance(OVER_S + 1.0)
        turn(engine, "foreign", prompt(70, seed=90), "other")  # whose steps look for the silent
        assert len(program.left) == MAX_RESTING
        return
    if ends_by == "final beside another":
        engine.add("other", prompt(70, seed=50), 200, program="app")
        for _ in range(3):
            engine.step()
    # A last turn must continue what its program's last turn left.
    tokens = engine.next_prompt(f"side{MAX_RESTING + 2}", 20)
    engine.add("last", tokens, 6, program="app", final=True)
    engine.run_until_idle(until=lambda: "last" in engine.finish_reasons)
    is_alone = ends_by == "final"
    assert len(program.left) == (MAX_RESTING if is_alone else MAX_RESTING + 3)


# --- a client that interrupts every answer ---------------------------------------------------
def interrupted(engine: Engine, named: Name, gap_s: float = 1.0) -> int:
    """What two conversations find whose client stops each answer and goes on with what it has, as a
    person who interrupts a voice does, beside questions that need all the room."""
    found, said = 0, {name: prompt(200, seed) for seed, name in enumerate(("left", "right"))}
    for number in range(8):
        for name in said:
            turn_id = f"{name}{number}"
            engine.add(turn_id, said[name], 40, program=named(name))
            engine.run_until_idle(until=lambda which=turn_id: len(engine.outputs[which]) >= 24)
            engine.abort(turn_id)
            engine.run_until_idle()
            found += sum(engine.cached[turn_id]) if number > 1 else 0
            said[name] = said[name] + engine.outputs[turn_id][:24] + prompt(20, 100 + number)
            later(engine, gap_s)
            turn(engine, f"asked{name}{number}", prompt(160, 7 * number + len(name)), None)
    return found


@pytest.mark.parametrize("num_slots", [0, 400], ids=["vram", "dram"])
@pytest.mark.parametrize("named", [itself, nothing])
def test_who_interrupts_every_answer_finds_what_it_left(num_slots: int, named: Name) -> None:
    """In stock vLLM the newest stays longest. An answer that nobody waited for was let go at once,
    so questions came before it."""
    found = interrupted(ours(60, num_slots), named)
    assert found >= interrupted(stock(60), named)
    assert found >= 12 * 200, "each turn after the second finds at least its first prompt"


def test_who_went_away_once_is_not_kept_for() -> None:
    """Nothing has shown that its client goes on."""
    engine = ours(200, 0)
    for number, name in enumerate(("a", "b")):
        engine.add(name, prompt(200, number), 40, program="p")
        engine.run_until_idle(until=lambda which=name: len(engine.outputs[which]) >= 24)
        engine.abort(name)
        engine.run_until_idle()
        assert not engine.connector.side.pins


def test_once_others_went_on_with_interrupted_answers_a_new_programs_first_is_kept() -> None:
    """As long as most do; and no longer than most do."""
    engine = ours(200, 0)

    def interrupt(name: str, tokens: list[int], program: str) -> None:
        engine.add(name, tokens, 40, program=program)
        engine.run_until_idle(until=lambda: len(engine.outputs[name]) >= 24)
        engine.abort(name)
        engine.run_until_idle()

    def is_pinned(program: str) -> bool:
        return any(engine.connector.side.pins.of(f"job:{program}"))

    interrupt("a0", prompt(200, 1), "a")
    assert not is_pinned("a")
    interrupt("a1", prompt(200, 1) + engine.outputs["a0"][:24] + prompt(20, 2), "a")
    for number, name in enumerate(("b", "c", "d")):  # who never go on
        interrupt(name, prompt(200, 3 + number), name)
    assert (is_pinned("b"), is_pinned("d")) == (True, False)


def test_who_asks_the_same_again_has_not_gone_on_with_an_interrupted_answer() -> None:
    """As a client does whose time is up, and which tries again: a new client's is let go."""
    engine = ours(200, 0)
    for name, seed, program in (("a", 1, "a"), ("again", 1, "a"), ("b", 2, "b")):
        engine.add(name, prompt(200, seed), 40, program=program)
        engine.run_until_idle(until=lambda which=name: len(engine.outputs[which]) >= 24)
        engine.abort(name)
        engine.run_until_idle()
    assert not any(engine.connector.side.pins.of("job:b"))


def test_several_conversations_of_an_id_each_go_on_with_an_interrupted_answer() -> None:
    """All three do, so a new client's is kept."""
    engine = ours(400, 0)
    said = {name: prompt(200, seed) for seed, name in enumerate("abc")}
    for turn in ("first", "next"):
        for name in said:
            engine.add(name + turn, said[name], 40, program="app")
        engine.run_until_idle(until=lambda: min(map(len, engine.outputs.values())) >= 24)
        for name in said:
            engine.abort(name + turn)
            said[name] = said[name] + engine.outputs[name + turn][:24] + prompt(20, 9)
        engine.run_until_idle()
    engine.add("new", prompt(200, 4), 40, program="new")
    engine.run_until_idle(until=lambda: len(engine.outputs["new"]) >= 24)
    engine.abort("new")
    engine.run_until_idle()
    assert any(engine.connector.side.pins.of("job:new"))


def test_another_conversation_of_an_id_has_not_gone_on_with_an_interrupted_answer() -> None:
    """It only begins alike, so that it may be taken for an edit."""
    engine = ours(400, 0)
    common = prompt(160, 1)
    for name, tokens, program in (
        ("a", common + prompt(60, 2), "a"),
        ("other", common + prompt(80, 3), "a"),
        ("b", prompt(200, 4), "b"),
    ):
        engine.add(name, tokens, 40, program=program)
        engine.run_until_idle(until=lambda which=name: len(engine.outputs[which]) >= 24)
        engine.abort(name)
        engine.run_until_idle()
    assert not any(engine.connector.side.pins.of("job:b"))


def test_who_gives_up_a_preempted_turn_takes_nothing_from_what_it_left() -> None:
    """It has no block. Also where clients go on with interrupted answers."""
    engine = ours(40, 0, max_num_seqs=4)
    side = engine.connector.side
    turn(engine, "first", prompt(20, 9), "old")
    later(engine, 0.5)
    engine.add("left", prompt(200, 1), 8, program="p")
    engine.run_until_idle()
    before = dict(side.programs.get("job:p").left)
    resumed = side.programs.get("job:p")
    resumed.resumes_cut = True
    engine.add("older", prompt(160, 9), 300, program="old")
    later(engine, 0.1)
    engine.add("given up", engine.next_prompt("left", 20), 300, program="p")
    is_preempted = RequestStatus.PREEMPTED
    engine.run_until_idle(until=lambda: engine.requests["given up"].status is is_preempted)
    assert engine.requests["given up"].num_output_tokens
    engine.abort("given up")
    engine.run_until_idle(until=lambda: "given up" not in engine.scheduler.requests)
    assert resumed.left == before


def test_an_interrupted_answer_is_known_that_is_not_its_programs_first() -> None:
    """Nobody says a name, and two forks go on at once from an answer that is too short to tell
    whose it is."""
    engine = ours(400, 0)
    programs: dict[str, str] = {}

    def interrupt(**most: int) -> None:
        engine.run_until_idle(
            until=lambda: all(len(engine.outputs[name]) >= most[name] for name in most)
        )
        for name in most:
            programs[name] = engine.connector.side.turns.get(name).program.key
            engine.abort(name)
        engine.run_until_idle()

    def goes_on(name: str, num_said: int) -> list[int]:
        return [*engine.requests[name].prompt_token_ids, *engine.outputs[name][:num_said]]

    engine.add("main", prompt(100, 1), 40)
    interrupt(main=4)
    for seed, fork in enumerate(("left", "right")):
        engine.add(fork, goes_on("main", 4) + prompt(32, seed), 40)
    interrupt(left=24, right=4)
    engine.add("left.next", goes_on("left", 24) + prompt(32, 9), 40)
    interrupt(**{"left.next": 4})
    assert programs["left.next"] == programs["left"]


def test_who_gives_up_before_an_answer_begins_takes_nothing_from_what_it_left() -> None:
    """Also a client that interrupts answers may do so."""
    engine = ours(200, 0)
    said = prompt(200, 1)
    for number in range(3):
        engine.add(str(number), said, 40, program="p")
        engine.run_until_idle(until=lambda which=str(number): len(engine.outputs[which]) >= 24)
        engine.abort(str(number))
        engine.run_until_idle()
        said = said + engine.outputs[str(number)][:24] + prompt(20, 100 + number)
    left = dict(engine.connector.side.programs.get("job:p").left)
    assert len(engine.connector.side.pins) == 1
    engine.add("gone", said, 40, program="p")
    engine.abort("gone")
    engine.run_until_idle()
    assert engine.connector.side.programs.get("job:p").left == left
    assert turn(engine, "last", said, "p") >= 200 + 2 * 44


@pytest.mark.parametrize("is_edited", [True, False])
def test_a_pin_gives_way_first_once_its_conversation_goes_on_edited(is_edited: bool) -> None:
    """A client clears old results, or condenses them, and sends the answer back behind that: nobody
    comes back for the pin. Another conversation of its id begins alike, and leaves it as it was."""
    engine = tiered(200, 0, config={"policy": "adaptive"})
    know(engine.connector.costs, {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0]})
    engine.add("a", 640, program="p", max_tokens=40)
    engine.run_until_idle()
    (pin,) = engine.connector.side.pins
    worth, said = pin.rank[0], engine.outputs["a"] if is_edited else prompt(40, 7)
    engine.add("b", prompt(640)[:64] + said + prompt(32, 8), program="p", max_tokens=2)
    assert pin.ended is None
    assert (pin.rank[0] == 0.0) is is_edited
    assert worth > 0.0
