"""Room and holds over a small pool: pins give way one allocation at a time, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.errors import InvariantError
from continuum_connector.policy.base import After
from continuum_connector.programs.continuation import Kept
from continuum_connector.programs.program import Identity, IdentitySource, Program
from continuum_connector.scheduler.holds import HoldTable
from continuum_connector.scheduler.pins import (
    MAX_IN_VAIN,
    MAX_SPARED,
    RETRY_STEPS,
    Room,
)
from continuum_connector.scheduler.turns import LivePin, PinEnd, PinTable, Turn
from tests.fakes import FakeBlock, FakeBlockPool, taken
from tests.proofs import prove_holds

DEAR = 2.0  # worth more than the wait of a turn that nobody knows, which is 0


class World:
    """A pool of 20 usable blocks, pins on it, and a count of allocations tried."""

    def __init__(self, num_blocks: int = 20) -> None:
        self.pool = FakeBlockPool(1 + num_blocks)
        self.holds = HoldTable(self.pool)
        self.pins = PinTable()
        self.ended: list[str] = []
        self.num_tries = 0
        self.num_blocked = 0
        self.mean_blocks = 1.0
        world: Any = self  # stands for Retention and Costs as well
        self.room = Room(self.pool, world, self.worth_now, world, max_wait_s=1.0)

    def gave_way(self, pin: LivePin, now: float) -> None:
        self.holds.settle_trial(pin.hold)
        self.pins.remove(pin, PinEnd.PRESSURE)
        self.ended.append(pin.program)

    def worth_now(self, pin: LivePin, now: float) -> float:
        return pin.rank[0] if pin.rank[0] else -1.0

    def blocked(self, now: float) -> None:
        self.num_blocked += 1

    def unblocked(self, now: float) -> None:
        pass

    def run(self, number: int) -> list[FakeBlock]:
        """Blocks of a running request."""
        return self.pool.take(number)

    def pin(
        self, program: str, blocks: list[FakeBlock], arrival: float, value: float = 0.0
    ) -> LivePin:
        pin = LivePin(
            program,
            taken(self.holds, blocks),
            (),
            0.0,
            9.0,
            After.DROP,
            (value, -arrival),
            Kept(),
        )
        self.pins.add(pin)
        return pin

    def pin_finished(
        self, program: str, number: int, arrival: float, value: float = 0.0
    ) -> LivePin:
        """A turn ended: only the pin keeps its blocks."""
        blocks = self.run(number)
        pin = self.pin(program, blocks, arrival, value)
        self.pool.free_blocks(reversed(blocks))
        return pin

    def need(
        self, number: int, own: LivePin | None = None, bound: int | None = None, hits: int = 0
    ) -> list[FakeBlock] | None:
        """Allocate as vLLM does; `hits` free blocks are found rather than taken."""

        def attempt() -> list[FakeBlock] | None:
            self.num_tries += 1
            enough = self.pool.get_num_free_blocks() >= number + hits
            return self.pool.take(number) if enough else None

        need = number if bound is None else bound
        turn: Turn | None = None
        if own is not None:
            program = Program(own.program, IdentitySource.CLIENT, arrival=0.0)
            turn = Turn("r", program, Identity(own.program, program.source), 1, arrival=-9.0)
            turn.came_for = own
        answer = self.room.make("r", turn, attempt, need, others_run=True, now=0.0)
        prove_holds(self.holds)
        return answer


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("number", "ended"), [(6, ["c"]), (10, ["c"]), (11, ["c", "b"]), (20, ["c", "b", "a"])]
)
def test_the_cheapest_give_way_and_no_more_than_needed(
    world: World, number: int, ended: list[str]
) -> None:
    for arrival, program in enumerate("abc"):
        world.pin_finished(program, 5, arrival)
    assert world.need(number)
    assert world.ended == ended
    assert world.num_tries == 1, "an allocation that cannot fit yet is not tried"


@pytest.mark.parametrize(
    ("number", "ended"), [(10, ["a"]), (11, ["c", "a"]), (15, ["c", "b", "a"])]
)
def test_what_a_dear_pin_frees_spares_cheaper_ones(
    world: World, number: int, ended: list[str]
) -> None:
    """Of those the dearest; else a long pin's end would cost every short one that is cheaper."""
    for arrival, (program, size) in enumerate([("a", 10), ("b", 3), ("c", 2)]):
        world.pin_finished(program, size, arrival, DEAR)
    world.run(5)
    assert world.need(number)
    assert world.ended == ended


def test_what_is_worth_less_than_a_wait_is_not_spared(world: World) -> None:
    world.pin_finished("a", 10, 0, DEAR)
    world.pin_finished("b", 3, 1, value=0.0)
    world.pin_finished("c", 2, 2, DEAR)
    world.run(5)
    assert world.need(10)
    assert world.ended == ["b", "a"]


def test_who_needs_more_than_it_says_gets_what_was_to_be_spared(world: World) -> None:
    for arrival, (program, size) in enumerate([("a", 10), ("b", 3), ("c", 2)]):
        world.pin_finished(program, size, arrival, DEAR)
    world.run(5)
    assert world.need(12, bound=10)
    assert (world.ended, world.num_tries) == (["c", "b", "a"], 2)


def test_pins_are_put_back_in_vain_but_a_few_times() -> None:
    """A running turn says nothing of its need, so each pin might put all others back."""
    world = World(num_blocks=100)
    for arrival in range(50):
        world.pin_finished(f"{arrival}", 2, arrival, DEAR)
    assert world.need(100, bound=0)
    assert (len(world.ended), world.num_tries) == (50, 50 + MAX_IN_VAIN)


def test_a_turn_that_found_no_room_or_took_a_pin_for_it_is_told_of_and_a_wish_is_no_pin(
    world: World,
) -> None:
    world.pin_finished("a", 5, 0)
    world.run(12)
    assert world.need(6)
    assert (world.ended, world.num_blocked) == (["a"], 1)
    assert world.need(6) is None
    assert world.num_blocked == 2
    assert world.need(6, bound=0) is None
    assert world.num_blocked == 2, "a running one waits for nothing"
    wishes = World()
    wishes.pin_finished("w", 20, 0).is_wish = True
    assert wishes.need(11)
    assert (wishes.ended, wishes.num_blocked) == (["w"], 0)


def test_while_turns_find_no_room_pins_age_a_few_per_step_each_in_its_turn(world: World) -> None:
    for arrival, program in enumerate("abcd"):
        world.pin_finished(program, 5, arrival)
    world.room.new_step(now=0.0)
    assert {pin.rank[0] for pin in world.pins} == {0.0}
    assert world.need(21) is None
    world.room.new_step(now=0.0)
    assert sorted(pin.program for pin in world.pins if pin.rank[0]) == ["a", "b"]
    world.room.new_step(now=0.0)
    assert sum(pin.rank[0] == -1.0 for pin in world.pins) == 2, "nobody waited"
    assert world.need(21) is None
    world.room.new_step(now=0.0)
    assert all(pin.rank[0] == -1.0 for pin in world.pins)


def test_what_cannot_be_is_not_tried(world: World) -> None:
    world.run(12)
    world.pin_finished("a", 5, 0)
    before = world.pool.state()
    assert world.need(9) is None
    assert (world.num_tries, world.pool.state()) == (0, before)


def test_a_trial_that_fails_leaves_references_and_free_queue_as_they_were(world: World) -> None:
    for arrival, program in enumerate("abc"):
        world.pin_finished(program, 5, arrival)
    before = world.pool.state()
    assert world.need(11, hits=10) is None
    assert world.num_tries > 0
    assert world.pool.state() == before
    assert (world.ended, len(world.pins), world.holds.num_holds) == ([], 3, 3)
    assert [pin.program for pin in world.pins.cheapest_first()] == ["c", "b", "a"]


def test_pins_of_blocks_that_somebody_uses_gain_nothing_and_are_kept(world: World) -> None:
    shared = world.run(10)
    world.pin("a", shared[:6], 0)
    world.pin("b", shared[2:], 1)
    world.run(10)
    before = world.pool.state()
    assert world.need(1, bound=0) is None
    assert (world.num_tries, world.pool.state(), len(world.pins)) == (0, before, 2)


def test_two_pins_that_share_blocks_free_them_only_together(world: World) -> None:
    blocks = world.run(10)
    world.pin("a", blocks, 0)
    world.pin("b", blocks, 1)
    world.pool.free_blocks(blocks)
    world.run(10)
    assert world.need(1)
    assert world.ended == ["b", "a"]


def test_the_own_pin_goes_last_though_it_is_the_cheapest(world: World) -> None:
    world.pin_finished("old", 5, 0)
    own = world.pin_finished("own", 5, 1)
    assert world.need(12, own=own)
    assert world.ended == ["old"]


def test_the_own_pin_goes_if_nothing_else_is_left(world: World) -> None:
    world.pin_finished("old", 5, 0)
    own = world.pin_finished("own", 5, 1)
    assert world.need(18, own=own)
    assert world.ended == ["old", "own"]


def test_a_hopeless_allocation_is_not_tried_again_until_something_changed(world: World) -> None:
    world.pin_finished("a", 10, 0)
    for _ in range(5):
        assert world.need(11, hits=10) is None
    assert world.num_tries == 1
    world.room.references_dropped()
    assert world.need(11, hits=10) is None
    assert world.num_tries == 2
    for _ in range(RETRY_STEPS):
        world.room.new_step(now=0.0)
    assert world.need(11, hits=10) is None
    assert world.num_tries == 3
    world.pin_finished("b", 2, 1)
    assert world.need(11, hits=10) is None
    assert world.num_tries > 3


def test_for_a_running_request_pins_are_tried_every_time(world: World) -> None:
    world.run(10)
    held = world.pin_finished("a", 10, 0)
    store = HoldTable(world.pool, beside=world.holds)
    copy = store.take(held.hold.blocks, held.hold.ids)
    assert world.need(1, bound=0) is None
    store.release(copy)  # nothing that Room can see has changed
    assert world.need(1, bound=0)
    assert world.ended == ["a"]


def test_without_pins_the_answer_is_vllms(world: World) -> None:
    world.run(20)
    assert world.need(1) is None
    assert world.num_tries == 0


# --- holds --------------------------------------------------------------------------------
def test_a_hold_keeps_blocks_until_it_is_released_once(world: World) -> None:
    blocks = world.run(3)
    first, second = taken(world.holds, blocks), taken(world.holds, blocks[:2])
    world.pool.free_blocks(blocks)
    assert (world.holds.num_blocks, world.holds.num_holds, len(world.pool.free)) == (3, 2, 17)
    world.holds.release(first)
    assert (world.holds.num_blocks, len(world.pool.free)) == (2, 18)
    with pytest.raises(InvariantError, match="hold of 3 blocks released twice"):
        world.holds.release(first)
    world.holds.release(second)
    assert (world.holds.num_blocks, world.holds.num_holds, len(world.pool.free)) == (0, 0, 20)


def test_of_two_tables_the_pool_sees_one_reference_until_the_last_hold_goes(world: World) -> None:
    copies = HoldTable(world.pool, beside=world.holds)
    blocks = world.run(4)
    pin, copy = taken(world.holds, blocks), taken(copies, blocks[1:3])
    world.pool.free_blocks(blocks)
    assert [block.ref_cnt for block in blocks] == [1, 1, 1, 1]
    assert (world.holds.num_blocks, copies.num_blocks) == (4, 2)
    world.holds.try_without(pin)
    assert [block.ref_cnt for block in blocks] == [0, 1, 1, 0]
    world.holds.restore(pin)
    copies.release(copy)
    assert [block.ref_cnt for block in blocks] == [1, 1, 1, 1]
    world.holds.release(pin)
    assert len(world.pool.free) == 20
    prove_holds(world.holds)


def test_the_tail_of_a_chain_is_given_out_first(world: World) -> None:
    blocks = world.run(20)
    hold = taken(world.holds, blocks)
    world.pool.free_blocks(blocks)
    world.holds.release(hold)
    assert world.pool.take(20) == blocks[::-1]


def test_a_trial_is_restored_or_settled_once(world: World) -> None:
    pin = world.pin_finished("a", 5, 0)
    before = world.pool.state()
    world.holds.try_without(pin.hold)
    assert len(world.pool.free) == 20
    world.holds.restore(pin.hold)
    assert world.pool.state() == before
    world.holds.try_without(pin.hold)
    world.holds.settle_trial(pin.hold)
    with pytest.raises(InvariantError, match="released twice"):
        world.holds.settle_trial(pin.hold)
    assert world.holds.num_holds == 0


def test_check_finds_a_block_that_lost_our_reference(world: World) -> None:
    pin = world.pin_finished("a", 5, 0)
    world.pool.free_blocks([pin.hold.blocks[2]])
    with pytest.raises(AssertionError, match="block 3 is free, and we hold it"):
        prove_holds(world.holds)


@pytest.mark.parametrize(("num_dear", "ended"), [(MAX_SPARED - 1, ["late"]), (MAX_SPARED, [])])
def test_a_patient_turn_gives_up_after_it_has_spared_so_many_pins(
    world: World, num_dear: int, ended: list[str]
) -> None:
    shared = world.run(10)
    for number in range(num_dear):
        world.pins.revalue(world.pin(f"dear {number}", shared, arrival=1.0), 5.0)
    world.pins.revalue(world.pin_finished("late", 10, arrival=3.0), 9.0)  # it may be taken
    program = Program("waits", IdentitySource.CLIENT, arrival=2.0)
    turn = Turn("r", program, Identity("waits", IdentitySource.CLIENT), 1, arrival=2.0)
    found = world.room.make("r", turn, lambda: True, need=10, others_run=True, now=2.5)
    assert (bool(found), world.ended) == (bool(ended), ended)
