"""Hints in vLLM's own loop: honoured on the client's own account, and never at another's cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from continuum_connector.toolcalls import UNREAD
from tests.vllm.agents import AgentEngine, live

TTL_S = 2.0  # the default of ttl_s
GREEDY = {"ttl_s": 86_400}  # the wish
CLAIMS = {"parent": "m0", "tools": ["pytest"]}  # facts that take nothing where nobody reads them
FACTS = {"final": True, "compaction": True, "parent": "g0", "tools": ["pytest"]}


def says(program: str, **hints: Any) -> dict[str, Any]:
    return {"continuum": {"program": program, **hints}}


def told(engine: AgentEngine, request_id: str) -> dict[str, dict[str, Any]]:
    """The receipts of a turn, by hint."""
    answers = engine.kv_transfer_params[request_id]["continuum"].get("hints", [])
    return {answer["hint"]: answer for answer in answers}


def watched(**kwargs: Any) -> AgentEngine:
    """An engine that notes the pins that end: (program, cause, seconds held)."""
    engine = AgentEngine(max_num_batched_tokens=4096, max_num_seqs=3, **kwargs)
    engine.ended = []  # type: ignore[attr-defined]
    plain = engine.side.records.pin_ended

    def pin_ended(pin: Any, cause: Any, now: float) -> None:
        engine.ended.append((pin.program, cause.value, round(now - pin.started, 6)))  # type: ignore[attr-defined]
        plain(pin, cause, now)

    engine.side.records.pin_ended = pin_ended
    return engine


# --- nobody else pays -------------------------------------------------------------------
Play = list[tuple[Any, ...]]
EVENTS = st.one_of(
    st.tuples(st.just("greedy"), st.integers(20, 500)),
    st.tuples(st.just("modest"), st.integers(0, 1), st.integers(20, 200)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("idle"), st.sampled_from([0.3, 1.0, 2.1, 5.0])),
)


STRANGERS = st.tuples(st.just("stranger"), st.integers(0, 1), st.integers(20, 200))


def played(events: Play, hints: dict[str, Any], policy: str = "fixed_ttl") -> AgentEngine:
    """Greedy programs come once and say everything in `hints`; modest ones come back. Strangers
    send prompts of their own under a modest one's id, and state FACTS."""
    engine = watched(num_blocks=90, extra_config={"policy": policy})
    engine.side.decider.policy._max_fraction = 0.6
    last: dict[str, str] = {}
    for number, (kind, *rest) in enumerate(events):
        name = f"{number}"
        if kind == "greedy":
            said = says(f"g{number}", **hints)
            engine.add(name, rest[0], seed=number, max_tokens=8, kv_transfer_params=said)
        elif kind == "modest":
            program, num_new = f"m{rest[0]}", rest[1]
            before = last.get(program)
            if before is not None and before not in engine.finish_reasons:
                continue
            tokens = engine.next_prompt(before, 20) if before else num_new
            if not isinstance(tokens, int) and len(tokens) > 900:
                continue
            engine.add(name, tokens, seed=number, max_tokens=8, kv_transfer_params=says(program))
            last[program] = name
        elif kind == "stranger":
            said = says(f"m{rest[0]}", **FACTS)
            if f"m{rest[0]}" in last:
                engine.add(name, rest[1], seed=number, max_tokens=8, kv_transfer_params=said)
        elif kind == "steps":
            engine.steps(rest[0])
        else:
            engine.idle(rest[0])
    engine.run_until_idle()
    return engine


WISHER_FIRST: Play = [
    *[("greedy", 400), ("steps", 12), ("idle", 2.1), ("modest", 0, 150), ("steps", 12)],
    *[("greedy", 500), ("greedy", 500), ("steps", 12)],
]


@settings(max_examples=40)
@example(WISHER_FIRST, "fixed_ttl")
@given(st.lists(EVENTS, min_size=4, max_size=24), st.sampled_from(["fixed_ttl", "adaptive"]))
def test_hints_take_nothing_from_programs_that_give_none(events: Play, policy: str) -> None:
    said = GREEDY | CLAIMS
    if policy == "adaptive":  # it would learn from what is claimed of tools
        del said["tools"]
    plain, greedy = played(events, {}, policy), played(events, said, policy)
    assert greedy.admissions == plain.admissions
    assert greedy.num_preemptions == plain.num_preemptions
    assert greedy.clock() == plain.clock()
    assert of_modest(greedy) == of_modest(plain)


COMES_AND_GOES: Play = [
    *[("modest", 0, 150), ("stranger", 0, 100), ("steps", 12), ("stranger", 0, 100)],
    *[("steps", 12), ("idle", 5.0), ("stranger", 0, 100), ("steps", 12), ("modest", 0, 50)],
]


@settings(max_examples=40)
@example(COMES_AND_GOES, "fixed_ttl")
@given(
    st.lists(EVENTS | STRANGERS, min_size=6, max_size=24),
    st.sampled_from(["fixed_ttl", "adaptive"]),
)
def test_whoever_knows_only_the_ids_ends_nothing_by_what_he_states(
    events: Play, policy: str
) -> None:
    engine = played(events, {}, policy)
    for number, (kind, *_) in enumerate(events):
        if kind == "stranger" and f"{number}" in engine.requests:
            assert told(engine, f"{number}")["final"]["outcome"] == "refused"
    assert "program_done" not in {cause for _, cause, _ in of_modest(engine)}
    assert not engine.connector.costs._memory.num_programs
    for number, name in ((i, f"m{e[1]}") for i, e in enumerate(events) if e[0] == "modest"):
        program = engine.side.programs.get(name)
        assert (program.final, program.parent) == (False, None)
        if f"{number}" in engine.requests:
            assert program.arrival <= engine.requests[f"{number}"].arrival_time


def of_modest(engine: AgentEngine) -> list[tuple[str, str, float]]:
    return [end for end in engine.ended if end[0].startswith("m")]  # type: ignore[attr-defined]


def test_a_hundred_greedy_programs_cost_a_modest_one_nothing() -> None:
    """Pressed by running turns too: pins end, and hinted ones before the modest one's."""
    events: Play = [("modest", 0, 150), ("steps", 12)]
    for i in range(100):
        events += [("greedy", 60 + 13 * (i % 9)), ("idle", 0.15)]
        if i % 9 == 8:
            events += [("modest", 0, 0), ("steps", 2)]
    plain, greedy = played(events, {}), played(events, GREEDY)
    hits = [
        {i: n for i, n in each.cached.items() if events[int(i)][0] == "modest"}
        for each in (plain, greedy)
    ]
    assert hits[0] == hits[1]
    assert len(hits[0]) > 5
    assert greedy.admissions == plain.admissions
    assert of_modest(greedy) == of_modest(plain)
    assert {cause for _, cause, _ in of_modest(greedy)} == {"returned"}
    outcomes = {told(greedy, i)["ttl_s"]["outcome"] for i in greedy.kv_transfer_params
                if events[int(i)][0] == "greedy"}  # fmt: skip
    assert outcomes == {"clipped"}
    most = max(told(greedy, i)["ttl_s"]["until_s"] for i in ("2", "4"))
    assert most == 60.0


def test_a_longer_pin_gives_way_before_a_shorter_one_of_the_policy() -> None:
    """Also where its program came first and so would give way last."""
    engine = watched(num_blocks=100)
    engine.run_turn("a", 200, kv_transfer_params=says("greedy", ttl_s=50))
    engine.idle(TTL_S + 0.1)
    engine.run_turn("b", 200, seed=1, kv_transfer_params=says("modest"))
    assert live(engine) == ["greedy", "modest"]
    engine.run_turn("c", 75 * 16, seed=2, kv_transfer_params=says("c", final=True))
    assert live(engine) == ["modest"]


@pytest.mark.parametrize("wish", [{}, {"ttl_s": 50}])
def test_a_longer_pin_moves_nobodys_place_in_the_queue(wish: dict[str, Any]) -> None:
    engine = AgentEngine(200, max_num_seqs=1)
    engine.run_turn("older", 100, kv_transfer_params=says("older"))
    engine.run_turn("a", 100, seed=1, kv_transfer_params=says("a", **wish))
    engine.idle(TTL_S + 0.1)
    engine.add("busy", 100, seed=2, max_tokens=60)
    engine.steps(3)
    engine.add("a2", engine.next_prompt("a", 20), kv_transfer_params=says("a"))
    engine.add("older2", engine.next_prompt("older", 20), kv_transfer_params=says("older"))
    engine.run_until_idle()
    assert engine.admissions[-2:] == ["older2", "a2"]


def test_a_longer_pin_whose_program_is_back_gives_way_all_the_same() -> None:
    engine = AgentEngine(60, max_num_seqs=1)
    engine.side.decider.policy._max_fraction = 0.5
    engine.run_turn("a", 200, kv_transfer_params=says("greedy", ttl_s=50))
    engine.idle(TTL_S + 0.1)
    engine.run_turn("b", 200, seed=1, kv_transfer_params=says("modest"))
    engine.add("busy", 500, seed=2, max_tokens=100)
    engine.steps(2)
    engine.add("a2", engine.next_prompt("a", 20), kv_transfer_params=says("greedy"))
    engine.run_until_idle(until=lambda: bool(engine.ends()))
    assert (live(engine), engine.ends()) == (["modest"], {"pressure": 1})
    assert "busy" not in engine.finish_reasons


# --- what the client gets ---------------------------------------------------------------
def test_a_longer_pin_is_there_when_its_program_is_back_and_ends_when_promised() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200, kv_transfer_params=says("p", ttl_s=20))
    assert told(engine, "a") == {"ttl_s": {"hint": "ttl_s", "outcome": "accepted", "until_s": 20.0}}
    engine.idle(10)
    engine.run_turn("b", engine.next_prompt("a", 20), kv_transfer_params=says("p", ttl_s=20))
    assert engine.ends() == {"returned": 1}
    engine.idle(19)
    assert engine.num_pins() == 1
    engine.idle(2)
    assert engine.ends() == {"returned": 1, "expired": 1}
    assert (engine.usage(), engine.side.retention.num_hinted_blocks) == (0, 0)
    assert engine.side.retention.num_wish_blocks == 0


def test_the_budget_of_hinted_pins_is_full_and_free_again() -> None:
    engine = AgentEngine()  # 19 blocks
    for name in ("a", "b"):
        said = says(name, ttl_s=20)
        engine.run_turn(name, 200, seed=ord(name), kv_transfer_params=said)
    assert told(engine, "a")["ttl_s"]["outcome"] == "accepted"
    refused = told(engine, "b")["ttl_s"]
    assert (refused["outcome"], refused["until_s"]) == ("clipped", TTL_S)
    assert "13 of 19 blocks (20% of VRAM)" in refused["why"]
    engine.idle(21)
    engine.run_turn("c", 200, seed=7, kv_transfer_params=says("c", ttl_s=20))
    assert told(engine, "c")["ttl_s"]["outcome"] == "accepted"
    assert engine.total("hints", "accepted") == 2
    assert engine.total("hints", "clipped") == 1


def test_a_pin_larger_than_all_pins_may_be_is_refused() -> None:
    engine = AgentEngine(extra_config={"max_pinned_fraction": 0.1})
    engine.side.decider.policy._max_fraction = 1.0
    engine.run_turn("a", 300, kv_transfer_params=says("p", ttl_s=20))
    why = "larger than max_pinned_fraction of VRAM"
    assert told(engine, "a")["ttl_s"] == {"hint": "ttl_s", "outcome": "refused", "why": why}


# --- final ------------------------------------------------------------------------------
# Where the KV of a program is when a stranger comes.
VICTIMS = {
    "pinned": {"policy": "fixed_ttl", "ttl_s": 60},
    "offloaded": {"policy": "fixed_ttl", "ttl_s": 0.1, "dram_bytes": "64MiB"},
    "freed": {"policy": "program_order"},
}


def facts_of(engine: AgentEngine) -> tuple[Any, ...]:
    """What a program has that a stranger could take: its place, its life, what it left."""
    program = engine.side.programs.get("p")
    assert program is not None
    return (
        program.arrival,
        program.kept,
        program.final,
        program.num_counted,
        [pin.rank for pin in engine.side.pins],
        engine.side.decider.away.decision_of("p").gap_s,
        len(engine.side.tier.index._claims.order._live),
        engine.side.decider.away.forecast_of("p") is not None,
        engine.connector.costs._memory.num_programs,
        engine.ends(),
    )


@pytest.mark.parametrize("victim", VICTIMS)
def test_final_from_whoever_knows_only_the_id_takes_nothing(victim: str) -> None:
    engine = AgentEngine(200, max_num_seqs=1, extra_config=VICTIMS[victim])
    engine.run_turn("a", 200, kv_transfer_params=says("p", tools=["pytest"]))
    engine.run_turn("younger", 100, seed=7, kv_transfer_params=says("q"))
    engine.idle(1)
    before = facts_of(engine)
    for number in "12":  # his first turn does not make him known
        name = f"stranger{number}"
        engine.run_turn(name, 200, seed=4, kv_transfer_params=says("p", final=True))
        assert told(engine, name)["final"]["outcome"] == "refused"
        assert facts_of(engine) == before
    engine.idle(5)
    engine.add("busy", 100, seed=9, max_tokens=30)
    engine.steps(3)
    for name, program, last in (("q2", "q", "younger"), ("a2", "p", "a")):
        engine.add(name, engine.next_prompt(last, 20), kv_transfer_params=says(program))
    assert engine.side.turns.get("a2").number == 4
    engine.run_until_idle()
    assert engine.admissions[-2:] == ["a2", "q2"]
    _, gaps = engine.side.decider.gaps.recorded(UNREAD)
    assert min(gaps) > 5
    engine.run_turn("z", engine.next_prompt("a2", 20), kv_transfer_params=says("p", final=True))
    assert told(engine, "z")["final"] == {"hint": "final", "outcome": "accepted", "value": True}
    assert engine.side.programs.get("p").final
    assert engine.connector.costs._memory.num_programs == 1  # p; q may come back


def test_where_last_turns_are_stored_too_a_strangers_supersedes_nothing() -> None:
    extra = {"policy": "lru_offload", "dram_bytes": "64MiB"}
    engine = AgentEngine(200, extra_config=extra)
    engine.run_turn("a", 200, kv_transfer_params=says("p"))
    before = facts_of(engine)
    engine.run_turn("b", 200, seed=4, kv_transfer_params=says("p", final=True))
    assert facts_of(engine) == before
    assert len(engine.side.tier.index._claims.order._superseded) == 0


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_side_call_with_final_beside_the_first_turn_ends_nothing(victim: str) -> None:
    engine = AgentEngine(200, extra_config=VICTIMS[victim])
    engine.add("a", 200, max_tokens=40, kv_transfer_params=says("p"))
    engine.run_turn("title", 50, seed=4, kv_transfer_params=says("p", final=True))
    assert told(engine, "title")["final"]["outcome"] == "refused"
    engine.run_turn("b", engine.next_prompt("a", 20), kv_transfer_params=says("p"))
    assert engine.side.programs.get("p").arrival == 1000.0
    assert "program_done" not in engine.ends()
    assert engine.kv_transfer_params["b"]["continuum"]["turn"] == 3


def test_a_first_turn_may_be_the_last() -> None:
    engine = AgentEngine()
    for name in "ab":  # and the id used again is another program
        arrived = engine.clock()
        engine.run_turn(name, 200, seed=ord(name), kv_transfer_params=says("p", final=True))
        assert told(engine, name)["final"]["outcome"] == "accepted"
        assert engine.side.programs.get("p").arrival == arrived
    assert (engine.usage(), engine.num_pins()) == (0, 0)


def test_a_turn_that_went_away_while_it_waited_leaves_its_program_to_nobody() -> None:
    engine = AgentEngine(60, max_num_seqs=1)
    engine.run_turn("a", 200, kv_transfer_params=says("p"))
    engine.add("busy", 100, seed=9, max_tokens=30)
    engine.steps(3)
    engine.add("b", engine.next_prompt("a", 20), kv_transfer_params=says("p"))
    engine.step()
    engine.abort("b")
    engine.run_turn("c", 200, seed=4, kv_transfer_params=says("p", final=True))
    assert told(engine, "c")["final"]["outcome"] == "refused"


def test_a_program_of_another_salt_is_out_of_reach() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200, program="p", cache_salt="ours")
    engine.run_turn("b", 200, program="p", cache_salt="theirs")
    engine.run_turn("c", 200, program="p", final=True)
    assert engine.num_pins() == 2
    keys = {engine.kv_transfer_params[i]["continuum"]["program"] for i in "abc"}
    assert len(keys) == 3


# Every field in which a client may write a name: what `add` gets for it.
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "program": lambda text: {"kv_transfer_params": says(text)},
    "vendor": lambda text: {"kv_transfer_params": says(text, source="vendor")},
    "none": lambda text: {"kv_transfer_params": says(text, source="none")},
    "parent": lambda text: {"kv_transfer_params": says("child", parent=text)},
    "hint": lambda text: {"kv_transfer_params": {"agent_hint": {"trajectory_id": text}}},
    "job_id": lambda text: {"program": text},
    "session_id": lambda text: {"extra_args": {"session_id": text}},
}
OWNERS = {  # how a victim's program came by its key
    "anonymous": {},
    "anonymous, salted": {"cache_salt": "ours"},
    "salted": {"program": "run", "cache_salt": "ours"},
}


@pytest.mark.parametrize("salt", [None, "theirs"])
@pytest.mark.parametrize("owner", OWNERS)
def test_whoever_reads_a_key_he_cannot_name_takes_nothing_of_its_program(
    owner: str, salt: str | None
) -> None:
    engine = AgentEngine(400, extra_config={"policy": "fixed_ttl", "ttl_s": 60})
    said = OWNERS[owner]
    engine.run_turn("a", 200, **said)
    (pin,) = engine.side.pins
    theirs = {"cache_salt": salt} if salt else {}
    texts = pin.program, pin.program.split(":", 1)[1]
    own: Counter[str] = Counter()
    for number, (text, place) in enumerate((t, p) for t in texts for p in PLACES.values()):
        prompt = list(engine.requests["a"].all_token_ids) if said.get("cache_salt") else 50
        engine.run_turn(f"{number}", prompt, **theirs, **place(text), seed=number)
        answer = engine.kv_transfer_params[f"{number}"]["continuum"]
        assert answer["program"] != pin.program
        own[answer["program"]] += 1
        assert answer["turn"] == own[answer["program"]]
    assert pin in list(engine.side.pins)
    engine.run_turn("b", engine.next_prompt("a", 20), **said)
    answer = engine.kv_transfer_params["b"]["continuum"]
    assert (answer["program"], answer["turn"]) == (pin.program, 2)
    assert engine.ends()["returned"] >= 1


def test_a_prompt_continues_an_unnamed_program_of_its_own_salt_alone() -> None:
    engine = AgentEngine(400)
    engine.run_turn("a", 200, cache_salt="ours")
    theirs = engine.next_prompt("a", 20)
    for name, said in (("b", {}), ("c", {"cache_salt": "theirs"}), ("d", {"cache_salt": "ours"})):
        engine.run_turn(name, theirs, **said)
    turns = [engine.kv_transfer_params[i]["continuum"]["turn"] for i in "abcd"]
    assert turns == [1, 1, 1, 2]
