"""ProgramTable: lives of programs, concurrent turns, bounds. Answers: what each does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs

from continuum_connector.programs.continuation import Kept, PromptText
from continuum_connector.programs.lineage import NUM_ENDS
from continuum_connector.programs.program import (
    MAX_KEY_CHARS,
    MAX_LEFT,
    MAX_RESTING,
    OVER_S,
    PART,
    Answers,
    Hints,
    Identity,
    IdentitySource,
    Names,
    Program,
    ProgramTable,
)
from tests.unit.chains import request_of

NO_HINTS = Hints()
NO_TEXT = PromptText(None)


def named(key: str, **hints: object) -> Identity:
    return Identity(key, IdentitySource.CLIENT, Hints(**hints))  # type: ignore[arg-type]


def blocks(text: str) -> list[bytes]:
    return [text[:end].encode() for end in range(1, len(text) + 1)]


@pytest.fixture
def table() -> ProgramTable:
    return ProgramTable(max_programs=100)


def turn(
    table: ProgramTable,
    identity: Identity | None,
    now: float,
    prompt: str = "",
    output: str = "",
    hints: Hints | None = None,
) -> tuple[Program, Identity]:
    """Run one turn from `now` to `now` + 1."""
    program, known = table.begin_turn(identity, blocks(prompt), now, hints)
    sent = request_of(blocks(prompt + output))
    table.end_turn(program, known.hints, now + 1, sent, len(prompt))
    return program, known


def test_turns_of_one_program_share_its_record(table: ProgramTable) -> None:
    first, _ = turn(table, named("a"), 1.0)
    second, identity = turn(table, named("a"), 5.0)
    assert first is second
    assert identity == named("a")
    assert second == Program(
        "a", IdentitySource.CLIENT, 1.0, num_turns=2, num_finished=2, last_seen=6.0
    )


def test_a_program_that_was_silent_for_long_stands_in_line_as_one_that_just_came(
    table: ProgramTable,
) -> None:
    program, _ = turn(table, named("a"), 1.0)
    turn(table, named("a"), 2.0 + OVER_S)
    assert program.arrival == 1.0, "it may be silent for so long"
    turn(table, named("a"), 4.0 + 2 * OVER_S)
    assert program.arrival == 4.0 + 2 * OVER_S
    assert program.num_turns == 3, "and is the same program still"


def test_a_program_with_a_turn_under_way_is_not_silent(table: ProgramTable) -> None:
    program, _ = table.begin_turn(named("a"), [], 1.0)
    table.begin_turn(named("a"), [], 3.0 + OVER_S)
    assert program.arrival == 1.0


def test_concurrent_turns_of_one_program_are_ordinary(table: ProgramTable) -> None:
    for _ in range(2):
        program, _ = table.begin_turn(named("a"), [], 1.0)
    assert program.num_active == 2
    table.end_turn(program, NO_HINTS, 2.0)
    assert program.num_active == 1
    table.end_turn(program, NO_HINTS, 3.0)
    assert (program.num_turns, program.num_finished, program.num_active) == (2, 2, 0)


def test_a_finished_programs_key_may_be_used_again(table: ProgramTable) -> None:
    turn(table, named("a"), 1.0)
    program, _ = turn(table, named("a", final=True), 3.0)
    assert program.final
    again, _ = table.begin_turn(named("a"), [], 100.0)
    assert again is program
    assert (again.arrival, again.num_turns, again.num_finished) == (100.0, 1, 0)
    assert not again.final


def test_a_turn_beside_the_final_one_belongs_to_the_same_life(table: ProgramTable) -> None:
    program, last = table.begin_turn(named("a", final=True), [], 1.0)
    table.begin_turn(named("a"), [], 2.0)
    table.end_turn(program, last.hints, 3.0)
    assert (program.arrival, program.num_turns, program.final) == (1.0, 2, True)
    table.begin_turn(named("a", final=False), [], 4.0)
    assert not program.final


def test_a_stray_turn_takes_nothing_of_the_program(table: ProgramTable) -> None:
    program, _ = turn(table, named("a"), 1.0, "Sab", "ooo")
    _, stray = table.begin_turn(named("a", final=True), blocks("Xyz"), 5.0)
    table.end_turn(program, stray.hints, 6.0, request_of(blocks("Xyzpp")), 3, is_stray=True)
    assert (program.final, program.num_finished, program.num_active) == (False, 1, 0)
    assert turn(table, None, 7.0, "Xyzppq")[0] is not program
    assert turn(table, None, 9.0, "Saboooq")[0] is program
    assert program.arrival == 1.0


def test_a_subagent_keeps_its_own_program(table: ProgramTable) -> None:
    parent, _ = turn(table, named("p"), 1.0, "Sab", "ooo")
    child, identity = turn(table, named("c", parent="p"), 3.0, "Sabooot", "qqq")
    assert child is not parent
    assert (child.parent, identity.key) == ("p", "c")
    assert turn(table, None, 5.0, "Sabooox")[0] is parent
    assert turn(table, None, 7.0, "Saboootqqqx")[0] is child


def test_a_turn_without_identity_is_recognised_by_its_lineage(table: ProgramTable) -> None:
    first, who = turn(table, None, 1.0, "Sab", "ooo")
    assert who.source is IdentitySource.NONE
    hints = Hints(final=True)
    second, who = turn(table, None, 3.0, "Saboootool", "ppp", hints)
    assert second is first
    assert who == Identity(first.key, IdentitySource.LINEAGE, hints)
    assert (second.num_turns, second.final, second.source) == (2, True, IdentitySource.NONE)


def test_strangers_without_identity_get_programs_of_their_own(table: ProgramTable) -> None:
    keys = {turn(table, None, float(now), f"{now}")[0].key for now in range(1, 6)}
    assert len(keys) == 5


def test_the_turn_after_a_compaction_extends_the_turn_before_it(table: ProgramTable) -> None:
    program, _ = turn(table, None, 1.0, "Sab", "ooo")
    turn(table, named(program.key, compaction=True), 3.0, "Sabooosum", "yyy")
    assert turn(table, None, 5.0, "Saboootool")[0] is program


def test_the_least_recently_seen_program_is_forgotten_first() -> None:
    table = ProgramTable(max_programs=3)
    for now, key in enumerate("abca"):
        turn(table, named(key), float(now), key * 3, "out")
    turn(table, named("d"), 9.0)
    assert [key for key in "abcd" if table.get(key)] == ["a", "c", "d"]
    assert turn(table, None, 11.0, "bbbout?")[1].source is IdentitySource.NONE


def test_programs_in_use_are_never_forgotten() -> None:
    pinned = {"p0", "p1"}
    table = ProgramTable(max_programs=5, evictable=lambda key: key not in pinned)
    for key in sorted(pinned):
        turn(table, named(key), 0.0)
    table.begin_turn(named("busy"), [], 0.0)
    for now in range(500):
        turn(table, named(f"n{now}"), float(now))
        assert len(table) <= 6
    assert all(table.get(key) for key in ("p0", "p1", "busy"))


@pytest.mark.parametrize("num_pinned", [1, 100])
def test_others_are_forgotten_while_all_that_never_came_back_have_pins(num_pinned: int) -> None:
    table = ProgramTable(max_programs=200, evictable=lambda key: not key.startswith("anonymous:"))
    pinned = [turn(table, None, 0.0, f"{number:03}xx", "out")[0] for number in range(num_pinned)]
    for number in range(400):
        for _ in range(2):
            turn(table, named(f"n{number}"), float(number))
        assert len(table) <= 200 + 1
    assert all(table.get(program.key) is program for program in pinned)


def test_a_table_full_of_programs_in_use_grows_and_shrinks_again() -> None:
    table = ProgramTable(max_programs=10)
    programs = [table.begin_turn(named(f"a{number}"), [], 0.0)[0] for number in range(200)]
    assert len(table) == 200
    for program in programs:
        table.end_turn(program, NO_HINTS, 1.0)
    assert len(table) <= 10


def test_the_cost_of_a_turn_does_not_grow_with_the_programs_in_use() -> None:
    asked: list[str] = []

    def pinned(key: str) -> bool:
        asked.append(key)
        return False

    table = ProgramTable(max_programs=1, evictable=pinned)
    for number in range(300):
        turn(table, named(f"a{number}"), float(number))
    assert len(asked) <= 300 * 2 * 32


def test_20k_anonymous_requests_take_bounded_memory() -> None:
    table = ProgramTable(max_programs=100)
    lineage = table._lineage
    for number in range(20_000):
        prompt: Sequence[bytes] = (b"%d" % number,)
        program, _ = table.begin_turn(None, prompt, 0.0)
        table.end_turn(program, NO_HINTS, 0.0, request_of(prompt), 1)
    assert len(table) == len(table._programs) == 100
    assert len(lineage) <= 100 * NUM_ENDS
    assert len(lineage._by_program) <= 100
    assert len(lineage._positions) == len(lineage._counts) == 1


def test_a_program_is_expected_to_send_answers_back_as_it_did_last() -> None:
    answers = Answers(hash_size=1)
    sent = [b"prompt", b"answer"]

    def a_turn(name: str, comes_back_with: list[bytes]) -> Program:
        program = Program(name, IdentitySource.CLIENT, 0.0, kept=Kept.of(request_of(sent), 2, 1))
        answers.finished(program, sent, end=1)
        answers.came_back(program, comes_back_with)
        return program

    alters = a_turn("alters", [b"prompt", b"without its thoughts"])
    assert answers.are_altered(Program("new", IdentitySource.CLIENT, 0.0)), "as the last one did"
    repeats = a_turn("repeats", [*sent, b"tool"])
    assert not answers.are_altered(Program("new", IdentitySource.CLIENT, 0.0))
    assert answers.are_altered(alters)
    assert not answers.are_altered(repeats)


class Behind:
    """Turns whose client sends the same id with each of them."""

    def __init__(self, key: str, source: IdentitySource = IdentitySource.VENDOR) -> None:
        self.table = ProgramTable(100)
        self._said = Identity(key, source)

    def turn(self, prompt: str, answer: str, now: float = 0.0) -> str:
        program, identity = self.table.begin_turn(self._said, blocks(prompt), now)
        assert identity == structs.replace(self._said, key=program.key)
        sent = request_of(blocks(prompt + answer))
        self.table.end_turn(program, NO_HINTS, now, sent, len(prompt))
        return program.key


@pytest.mark.parametrize(
    "key", ["cache-key:app", "correlation:1", "helicone:1", "metadata:1", "salted:00:cache-key:app"]
)
def test_a_key_that_several_programs_share_names_one_only_while_its_prompts_go_on(key: str) -> None:
    behind = Behind(key)
    assert behind.turn("SSab", "ooo") == key
    other = behind.turn("SScd", "ppp")
    third = behind.turn("TTef", "qqq")
    assert len({key, other, third}) == 3
    assert all(each.startswith(f"{key}{PART}") for each in (other, third))
    assert behind.turn("SScdpppt", "rrr") == other
    assert behind.turn("SSabooou", "sss") == key
    assert behind.turn("TTefqqqv", "ttt") == third
    assert behind.turn("SSabooousssw", "uuu") == key


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("codex:1", IdentitySource.VENDOR),
        ("session:1", IdentitySource.SESSION),
        ("cache-key:app", IdentitySource.CONTINUUM),  # which the client itself calls its program
    ],
)
def test_an_id_of_one_run_names_it_whatever_its_prompts_are(
    key: str, source: IdentitySource
) -> None:
    behind = Behind(key, source)
    assert [behind.turn(prompt, "ooo") for prompt in ("SSab", "TTcd", "UUef")] == [key] * 3


def test_prompts_behind_one_shared_key_do_not_reach_programs_of_another() -> None:
    behind = Behind("cache-key:app")
    behind.turn("SSab", "ooo")
    theirs = Identity("cache-key:other", IdentitySource.VENDOR)
    program, _ = behind.table.begin_turn(theirs, blocks("SSabooot"), 1.0)
    assert program.key == "cache-key:other"


def test_a_long_shared_key_stays_within_its_bound() -> None:
    behind = Behind("cache-key:" + "x" * (MAX_KEY_CHARS - len("cache-key:")))
    behind.turn("SSab", "ooo")
    other = behind.turn("TTcd", "ppp")
    assert len(other) == MAX_KEY_CHARS
    assert behind.turn("TTcdpppt", "qqq") == other


# --- what its turns left --------------------------------------------------------------------
def left_of(program: Program, number: int) -> None:
    for at in range(number):
        program.leave(Kept.of(request_of(blocks(f"{at:03}abcd")), 7, 16), None, None, float(at))


def test_of_a_program_that_nobody_comes_back_for_only_the_newest_is_known_again() -> None:
    program = Program("p", IdentitySource.CLIENT, 0.0)
    left_of(program, MAX_LEFT + 5)
    assert len(program.left) == MAX_LEFT
    program.rest()
    assert [int(at) for at in program.left] == list(range(MAX_LEFT + 5))[-MAX_RESTING:]
    newest = MAX_LEFT + 4
    assert program.left_by(blocks(f"{newest:03}abcdefg"), NO_TEXT) == newest
    assert program.left_by(blocks("010abcdefg"), NO_TEXT) is None


def test_a_request_of_less_than_a_block_takes_nobodys_place() -> None:
    program = Program("p", IdentitySource.CLIENT, 0.0)
    program.leave(Kept(), None, None, 0.0)
    assert program.left_by(blocks("any"), NO_TEXT) == 0.0, "who can tell?"
    left_of(program, 1)
    for at in range(10, 10 + 2 * MAX_LEFT):
        program.leave(Kept(), None, None, float(at))
    assert len(program.left) == 2
    assert program.left_by(blocks("000abcdefg"), NO_TEXT) == 0.0
    assert program.left_by(blocks("other"), NO_TEXT) is None


# --- ids that name requests -----------------------------------------------------------------
CHATS = ("aaaa", "bbbb", "cccc", "dddd", "eeee")


def chats_go_on(table: ProgramTable, identity: Callable[[int], Identity]) -> list[str]:
    """Two turns of each chat, the second under another id; the keys of those."""
    for number, text in enumerate(CHATS):
        turn(table, identity(number), 1.0 + number, text, "xyz" + text)
    return [
        turn(table, identity(10 + number), 20.0 + number, f"{text}xyz{text}tool")[1].key
        for number, text in enumerate(CHATS)
    ]


def test_where_no_id_comes_back_prompts_say_whose_turn_it_is(table: ProgramTable) -> None:
    keys = chats_go_on(table, lambda number: named(f"r{number}"))
    assert keys == ["r10", "r11", "r12", "r3", "r4"]  # three could have been forks
    assert len(table) == 8


def test_a_cache_key_for_each_request_is_none(table: ProgramTable) -> None:
    keys = chats_go_on(table, lambda n: Identity(f"cache-key:{n}", IdentitySource.VENDOR))
    assert keys[3:] == ["cache-key:3", "cache-key:4"]


@pytest.mark.parametrize("hints", [{"parent": "r0"}, {"final": True}])
def test_a_new_id_that_says_more_is_its_own(table: ProgramTable, hints: Any) -> None:
    keys = chats_go_on(table, lambda number: named(f"r{number}", **hints))
    assert keys == ["r10", "r11", "r12", "r13", "r14"]


def test_once_an_id_came_back_each_names_a_program(table: ProgramTable) -> None:
    turn(table, named("agent"), 0.1, "zzzz", "zzzz")
    turn(table, named("agent"), 0.5, "zzzzzzzz+", "zzzz")
    keys = chats_go_on(table, lambda number: named(f"r{number}"))
    assert keys == ["r10", "r11", "r12", "r13", "r14"]


def test_an_id_under_which_a_turn_was_anothers_comes_back(table: ProgramTable) -> None:
    assert chats_go_on(table, lambda number: named(f"r{number}"))[-1] == "r4"
    assert turn(table, named("r14"), 40.0, "eeeexyzeeeetoolmore")[1].key == "r14"
    assert turn(table, named("r99"), 50.0, "eeeexyzeeeetoolmore and more")[1].key == "r99"


def test_samples_and_retries_of_a_request_do_not_come_back(table: ProgramTable) -> None:
    for _ in range(2):
        table.begin_turn(named("sample"), blocks("ssss"), 0.1)
    for _ in range(2):
        turn(table, named("retry"), 0.2, "rrrr", "r")
    assert chats_go_on(table, lambda number: named(f"r{number}"))[-1] == "r4"


def test_ids_that_may_come_back_are_bounded(
    table: ProgramTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Names, "MAX_IDS", 3)
    for number in range(9):
        turn(table, named(f"n{number}"), 0.1, "nnnn")
    assert len(table._names._num_blocks) == 3


@pytest.mark.parametrize("key", ["correlation:{}", "salted:00:correlation:{}"])
def test_an_agents_own_id_that_came_back_says_nothing_of_a_gateways(
    table: ProgramTable, key: str
) -> None:
    agent = Identity("claude-code:1", IdentitySource.VENDOR)
    turn(table, agent, 0.1, "zzzz", "zzzz")
    turn(table, agent, 0.5, "zzzzzzzz+", "zzzz")
    keys = chats_go_on(table, lambda n: Identity(key.format(n), IdentitySource.VENDOR))
    assert keys[3:] == [key.format(3), key.format(4)]


@pytest.mark.parametrize("source", [IdentitySource.SESSION, IdentitySource.CONTINUUM])
def test_what_another_sources_turns_left_is_no_proof(
    table: ProgramTable, source: IdentitySource
) -> None:
    keys = chats_go_on(table, lambda n: Identity(f"r{n}", source) if n < 10 else named(f"r{n}"))
    assert keys == ["r10", "r11", "r12", "r13", "r14"]


def test_what_a_program_left_that_is_over_is_no_proof(table: ProgramTable) -> None:
    keys = chats_go_on(table, lambda n: named(f"r{n}", final=True if n < 10 else None))
    assert keys == ["r10", "r11", "r12", "r13", "r14"]


def test_an_id_that_has_a_program_is_never_anothers(table: ProgramTable) -> None:
    chats_go_on(table, lambda number: named(f"r{number}"))
    turn(table, named("short"), 40.0, "f", "gh")
    assert turn(table, named("new"), 50.0, "fghi")[1].key == "short"
    turn(table, named("brief"), 60.0, "k", "lm")
    assert turn(table, named("r0"), 70.0, "klmn")[1].key == "r0"
