"""Samples alone: who is of which group, when its prompt is stored and when it is let go of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from continuum_connector.observe.account import Account
from continuum_connector.programs.program import (
    OVER_S,
    Hints,
    Identity,
    IdentitySource,
    Program,
)
from continuum_connector.scheduler.kv_groups import ChainBlocks, KvGroup, KvGroups
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.samples import Samples
from continuum_connector.scheduler.turns import Turn

BLOCK = 16
PROMPT = [b"p0", b"p1", b"p2"]


class Tier:
    """Notes what it is asked; `has_room`: whether it takes anything."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, int]] = []
        self.demoted: list[str] = []
        self.has_room = True

    def store(self, key: str, blocks: ChainBlocks, *_: Any, supersedes: bool) -> bool:
        assert not supersedes
        self.stored.append((key, len(blocks)))
        return self.has_room

    def demote(self, key: str) -> None:
        self.demoted.append(key)


class Retention:
    """Notes whose pins end."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []

    def end_of(self, key: str, cause: PinEnd, now: float) -> None:
        self.ended.append((key, cause.value))


class World:
    """Programs that come and end; `most` are remembered."""

    def __init__(self, most: int = 100, keeps: bool = True, of_batch: bool = True) -> None:
        self.tier: Any = Tier()
        self.retention: Any = Retention()
        groups = KvGroups([KvGroup(0, BLOCK)], BLOCK)
        self.samples = Samples(self.tier, self.retention, groups, most, keeps, of_batch)
        self.now = 0.0
        self.turns: dict[str, Turn] = {}

    def begin(self, name: str, hashes: list[bytes] = PROMPT, **hints: Any) -> Program:
        """The program's first turn arrives, a second after who came before it."""
        self.now += 1.0
        program = Program(name, IdentitySource.CLIENT, self.now)
        self.turns[name] = Turn(
            program, Identity(name, IdentitySource.CLIENT, Hints(**hints)), 1, self.now
        )
        self.samples.begin(self.turns[name], self.request(hashes), self.now)
        return program

    def request(self, hashes: list[bytes]) -> Any:
        num_tokens = len(hashes) * BLOCK + 3
        return SimpleNamespace(num_prompt_tokens=num_tokens, block_hashes=[*hashes, b"answer"])

    def finish(self, name: str, hashes: list[bytes] = PROMPT) -> Any:
        blocks = ChainBlocks(
            (None,) * 4, [BLOCK * n for n in range(1, 5)], np.arange(4), (b"",) * 4
        )
        request = self.request(hashes)
        return self.samples.finished(self.turns[name], request, blocks, self.now)

    def end(self, name: str) -> None:
        self.samples.ended(self.turns[name].program, self.now)

    def shared(self) -> tuple[float, float]:
        """Prompts that are shared, and the programs that do."""
        account = Account()
        self.samples.update_gauges(account)
        return account.total("sample_groups"), account.total("samples")


def test_samples_stand_where_the_first_of_them_stands() -> None:
    world = World()
    world.begin("a", group="group:g", group_size=3)
    world.begin("other", [b"x", b"y"])
    assert world.begin("b", group="group:g", group_size=3).arrival == 1.0
    assert world.turns["other"].program.arrival == 2.0


def test_where_no_batch_is_served_nobody_comes_earlier_by_sending_what_others_sent() -> None:
    world = World(of_batch=False)
    for hints in ({"group": "group:g", "group_size": 3}, {}):
        name = f"with {len(hints)}"
        world.begin(name, **hints)
        assert world.begin(f"{name} more", **hints).arrival == world.now


def test_a_prompt_is_offered_while_others_need_it_and_let_go_of_with_the_last_sample() -> None:
    world = World()
    for name in "abc":
        world.begin(name, group="group:g", group_size=3)
    for name in "abc":
        world.finish(name)
        assert not world.tier.demoted
        world.end(name)
    assert world.tier.stored == [("group:g", len(PROMPT))] * 2
    assert world.tier.demoted == ["group:g"]
    assert len(world.samples) == 0


def test_a_prompt_stays_for_samples_that_have_not_come_yet() -> None:
    world = World()
    world.begin("a", group="group:g", group_size=2)
    world.finish("a")
    world.end("a")
    assert (world.tier.stored, world.tier.demoted) == ([("group:g", 3)], [])
    resident = world.samples.resident("group:g", 7.0, world.now)
    assert resident is not None
    assert (resident.is_waiting, resident.queueing_s, resident.arrival) == (True, 7.0, 1.0)
    world.begin("b", group="group:g", group_size=2)
    world.end("b")
    assert world.tier.demoted == ["group:g"]
    assert world.samples.resident("group:g", 7.0, world.now) is None


def test_a_turn_leaves_the_prompt_to_as_many_others_as_are_under_way_or_to_come() -> None:
    world = World()
    world.begin("a", group="group:g", group_size=3)
    world.begin("b", group="group:g", group_size=3)
    left = world.finish("a")
    assert (left.group.key, left.program, left.num_others) == ("group:g", "a", 2)
    assert (len(left.blocks), left.blocks.end) == (len(PROMPT), left.group.num_tokens)
    world.end("a")
    world.begin("c", group="group:g", group_size=3)
    assert world.finish("b").num_others == 1, "its prompt is in DRAM, and wanted all the same"
    world.end("c")
    assert world.finish("b") is None, "nobody else wants it"
    assert world.retention.ended == []
    world.end("b")
    assert world.retention.ended == [("group:g", "program_done")]


def test_without_a_word_the_same_first_prompt_makes_a_group() -> None:
    world = World()
    world.begin("a")
    world.finish("a")
    assert not world.tier.stored, "nobody else wants it"
    assert world.begin("b").arrival == 1.0
    world.begin("c", [b"p0", b"p1", b"other"])
    world.finish("b")
    world.finish("c", [b"p0", b"p1", b"other"])
    assert {number for _, number in world.tier.stored} == {3}
    world.end("a")
    assert not world.tier.demoted
    world.end("b")
    assert len(world.tier.demoted) == 1


def test_a_group_has_as_many_samples_as_it_was_to_have() -> None:
    world = World()
    for name in "ab":
        world.begin(name, group="group:g", group_size=2)
    assert world.begin("c", group="group:g", group_size=2).arrival == 3.0
    assert world.samples.of("c") is None


def test_the_same_name_for_another_prompt_is_another_group() -> None:
    world = World()
    world.begin("a", group="group:g", group_size=4)
    world.finish("a")
    assert world.begin("b", [b"q0", b"q1"], group="group:g", group_size=4).arrival == 2.0
    assert world.tier.demoted == ["group:g"]
    assert world.samples.of("a") is None
    world.end("a")


def test_a_prompt_that_found_no_room_is_not_let_go_of() -> None:
    world = World()
    world.tier.has_room = False
    for name in "ab":
        world.begin(name, group="group:g", group_size=2)
        world.finish(name)
    for name in "ab":
        world.end(name)
    assert world.tier.demoted == []


def test_a_turn_that_has_left_the_prompt_stores_nothing_for_the_group() -> None:
    world = World()
    world.begin("a", group="group:g", group_size=2)
    world.finish("a", [b"p0", b"p1", b"summary"])
    assert not world.tier.stored


def test_a_group_that_fell_silent_is_worth_nothing() -> None:
    world = World()
    world.begin("a", group="group:g", group_size=2)
    world.finish("a")
    assert world.samples.resident("group:g", 0.0, world.now + OVER_S + 1.0) is None


def test_it_is_told_how_many_share_a_prompt_and_each_turn_knows_which_sample_it_begins() -> None:
    world = World(most=3)
    world.begin("alone", [b"x"])
    assert (world.shared(), world.turns["alone"].sample) == ((0, 0), None)
    world.begin("a", group="group:g", group_size=3)
    world.begin("b", group="group:g", group_size=3)
    assert world.turns["b"].sample == ("group:g", 2, 3, 3 * BLOCK)
    world.begin("c", [b"x"])
    assert world.turns["c"].sample == (f"group:{b'x'.hex()}", 2, 0, BLOCK)
    assert world.shared() == (2, 3), "`alone` was forgotten: three programs at most"
    world.end("a")
    assert world.shared() == (2, 2)
    world.begin("d", group="group:g", group_size=3)
    world.end("b")
    world.end("d")
    assert world.shared() == (1, 1)
    world.end("c")
    assert (world.shared(), len(world.samples)) == ((0, 0), 0)
    world.begin("e", group="group:g", group_size=3)
    world.samples.clear()
    assert world.shared() == (0, 0)


def test_groups_are_bounded_and_the_one_seen_longest_ago_goes() -> None:
    world = World(most=2)
    for name in "abc":
        world.begin(name, [name.encode()], group=f"group:{name}", group_size=2)
        world.finish(name, [name.encode()])
    assert (len(world.samples), world.tier.demoted) == (2, ["group:a"])
    assert world.samples.of("a") is None


def test_of_programs_that_send_one_prompt_and_are_never_over_the_silent_one_is_forgotten() -> None:
    world = World(most=2)
    for name in "abac":
        world.begin(name)
    assert world.samples.of("b") is None
    group = world.samples.of("a")
    assert group is world.samples.of("c") is not None
    assert group.live == {"a", "c"}


@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_is_stored_where_the_policy_does_not_say_what_is_worth_its_place(
    keeps: bool,
) -> None:
    world = World(keeps=keeps)
    world.begin("a", group="group:g", group_size=2)
    world.finish("a")
    assert bool(world.tier.stored) is keeps


def test_ten_thousand_samples_of_a_prompt_are_counted_and_not_walked() -> None:
    """Each of their turns asks how many others there are."""

    class Counted(set[str]):
        def __sub__(self, other: Any) -> Any:
            raise AssertionError("looked at all of them")

        __iter__ = __sub__

    world = World()
    for name in "abc":
        world.begin(name)
    group = world.samples.of("a")
    assert group is not None
    group.live = Counted(group.live)
    assert (group.num_others("a"), group.num_others("x")) == (2, 3)
