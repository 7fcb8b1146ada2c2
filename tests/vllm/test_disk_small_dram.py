"""A DRAM of a context and a half above a disk: programs in turn, each wanting all that it left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from continuum_connector.scheduler.tiers.disk_reading import TRIES_PER_STEP, Prompt
from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm.fake_worker import OF_DISK
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    Costs,
    answers_as_without_a_tier,
    come_to_rest,
    hold,
    in_flight,
    on_disk,
    park,
    run_turn,
    total,
)

BLOCK, BLOCK_BYTES = 32, 8192  # of the harness' model
NUM_VRAM, NUM_DRAM, NUM_DISK = 65, 62, 2000
LENGTHS, NUM_PROGRAMS = (700, 908, 1116, 1324), 6


class Timed(Engine):
    """Steps take as long as what they compute, so that there is something to save; a copy of the
    disk so many steps."""

    delay = 1

    def _update(self) -> None:
        scheduled = self._queue[-1][0].num_scheduled_tokens.values() if self._queue else ()
        self.clock.advance(1.5e-4 * sum(scheduled))
        super()._update()

    def hold_copies(self) -> None:
        ages: Counter[int] = Counter()
        worker = self.worker

        def settle_due() -> None:
            for each, transfer in list(worker.pending.items()):
                ages[each] += 1
                if not isinstance(transfer.order, OF_DISK) or ages[each] >= self.delay:
                    worker.settle(each)

        worker._settle_due = settle_due  # type: ignore[method-assign]


def small(delay: int = 1) -> Timed:
    """The load `pressure` of `continuum bench ab` with a disk: DRAM has one and a half of the six
    contexts. A copy of the disk takes `delay` steps."""
    keys: dict[str, Any] = {"disk_path": "/disk", "disk_bytes": "1GiB", "policy": "adaptive"}
    keys |= {"dram_bytes": NUM_DRAM * BLOCK_BYTES}
    engine = Timed(
        NUM_VRAM, block_size=BLOCK, max_num_batched_tokens=2048, extra_config=keys, step_s=5e-3
    )
    engine.delay = delay
    engine.hold_copies()
    engine.worker.report_disk(NUM_DISK)
    engine.idle(10.0)
    for number in range(2):  # now it is known what a prompt costs
        engine.add(f"warm{number}", prompt(700, 1000 + number), 8, final=True)
        engine.run_until_idle()
    return engine


def lost(engine: Engine) -> Iterator[tuple[str, int]]:
    """Every program's first turn, then every second one, and so on; the next comes when one is
    answered. Of each how many tokens of whole blocks the last one left that it did not find."""
    for number, length in enumerate(LENGTHS):
        for program in range(NUM_PROGRAMS):
            request, is_last = f"p{program}.{number}", number == len(LENGTHS) - 1
            tokens, left = prompt(length, seed=program), list[int]()
            if number:
                left = list(engine.requests[f"p{program}.{number - 1}"].all_token_ids)
                tokens = left + prompt(length - len(left), seed=100 * number + program)
            engine.add(request, tokens, 8, program=f"p{program}", final=is_last)
            engine.run_until_idle(until=lambda asked=request: asked in engine.finish_reasons)
            found = engine.kv_transfer_params[request]["continuum"]["cached_tokens"]
            yield request, max(0, len(left) - 1) // BLOCK * BLOCK - sum(found.values())


@pytest.mark.parametrize("delay", [1, 4])
def test_programs_in_turn_compute_only_what_is_new_though_dram_holds_one_of_them(
    delay: int,
) -> None:
    """As on a real server: the next one comes as soon as the last one is answered."""
    engine = small(delay)
    assert not [turn for turn, num_lost in lost(engine) if num_lost > 0]
    engine.connector.side.update_gauges()
    assert total(engine, "disk_unsaved_blocks") == 0
    assert answers_as_without_a_tier(engine)


def came_back(**kwargs: Any) -> Engine:
    """`a` is on disk alone; what others left fills DRAM, and is being written."""
    engine = on_disk(num_slots=20, **kwargs)
    run_turn(engine, "a", 200, program="a")
    park(engine)
    run_turn(engine, "b", 200, seed=1, program="b")
    park(engine)
    come_to_rest(engine)
    engine.worker.disk.is_held = True
    run_turn(engine, "c", 200, seed=2, program="c", idle=False)
    while not in_flight(engine, Kind.WRITE):
        engine.step()
        engine.clock.advance(0.02)
    engine.add("d", engine.next_prompt("a", 20), program="a")
    return engine


def test_a_turn_reads_on_when_what_is_being_written_has_made_room() -> None:
    engine = came_back()
    engine.step()
    num_first = sum(len(each) for each in in_flight(engine, Kind.READ))
    assert 0 < num_first < 13, "DRAM has no room for all of it"
    engine.worker.disk.is_held = False
    engine.run_until_idle()
    assert engine.cached["d"] == (0, 208)
    assert answers_as_without_a_tier(engine)


def test_a_turn_waits_for_room_no_longer_than_for_reads() -> None:
    engine = came_back(costs=Costs(prefill=1e-3))
    for _ in range(60):
        engine.step()
    assert "d" in engine.finish_reasons
    hold(engine, False)
    engine.worker.disk.is_held = False
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    assert not engine.connector.side.tier.below.reading._waits
    assert engine.kv_transfer_params["d"]["continuum"]["disk"]["not_read"] == "room"


def test_of_many_that_wait_for_room_few_look_for_it_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one finds none, none does; and what it wants may have come for others."""
    engine = came_back()
    tokens = engine.next_prompt("a", 20)
    for number in range(30):
        engine.add(f"e{number}", [*tokens, number], program=f"e{number}")
    waits = engine.connector.side.tier.below.reading._waits.values()
    assert sum(each.rest is not None for each in waits) > 20
    looks = []
    own = Prompt.look
    monkeypatch.setattr(Prompt, "look", lambda *those: looks.append(those) or own(*those))
    most, began = 0, engine.clock()
    while len(engine.finish_reasons) < len(engine.requests):
        engine.step()
        engine.worker.disk.is_held = engine.num_steps % 8 != 0
        most, _ = max(most, len(looks)), looks.clear()
    assert 0 < most <= TRIES_PER_STEP
    assert engine.clock() - began < 2.0, "they waited until their deadline"
    engine.worker.disk.is_held = False
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)


def test_a_turn_that_found_no_room_looks_again_once_what_it_lacks_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = came_back()
    tier = engine.connector.side.tier
    engine.step()
    for read in in_flight(engine, Kind.READ):
        engine.settle(read.id)
    for _ in range(4):
        engine.step()
    wait = tier.below.reading._waits["d"]
    assert wait.rest is not None
    looks = []
    own = Prompt.look
    monkeypatch.setattr(Prompt, "look", lambda *those: looks.append(those) or own(*those))
    assert tier.below.reading.awaits("d", engine.clock())
    assert not looks
    number = next(iter(tier.index._numbers.values()))
    [wait.lacks] = tier.index.keys_at(np.array([number]))
    assert tier.below.reading.awaits("d", engine.clock())
    assert looks


def test_what_was_read_twice_as_it_left_meanwhile_is_counted_once() -> None:
    engine = came_back()
    tier = engine.connector.side.tier
    engine.step()
    for read in in_flight(engine, Kind.READ):
        engine.settle(read.id)
    engine.step()
    others = [b"other" + bytes([number]) * 31 for number in range(7)]
    worth = {"other": 0.0}
    tickets = tier.index.reserve(
        others,
        "other",
        engine.clock(),
        lambda program, _: worth.get(program, -1.0),
        ends=range(16, 128, 16),
    )
    assert len(tickets) == 7
    tier.index.settle(tickets, stored=True)
    tier.index.demote("other", others)
    engine.worker.disk.is_held = False
    engine.run_until_idle()
    assert engine.worker.disk.num_read > 13
    found = engine.kv_transfer_params["d"]["continuum"]["cached_tokens"]
    assert found == {"vram": 0, "dram": 0, "disk": 208}
    assert answers_as_without_a_tier(engine)


def test_a_turn_waits_for_no_room_while_a_restart_is_still_finding_and_nothing_is_written() -> None:
    engine = on_disk(num_slots=20)
    tier = engine.connector.side.tier
    run_turn(engine, "a", 200, program="a")
    park(engine)
    run_turn(engine, "b", 200, seed=1, program="b")
    park(engine)
    come_to_rest(engine)
    tier._is_new = True
    run_turn(engine, "c", 200, seed=2, program="c")
    assert tier.below.saving.has_new
    came = engine.clock()
    engine.add("d", engine.next_prompt("a", 20), program="a")
    while "d" not in engine.finish_reasons:
        tier._is_new = True
        engine.step()
    assert engine.clock() - came < 1.0
    assert answers_as_without_a_tier(engine)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_what_a_turn_in_line_was_read_stays_in_dram_until_it_is_loaded(is_waiting: bool) -> None:
    engine = on_disk()
    engine.idle(1.0)
    disk = engine.connector.side.tier.below
    disk._plan = disk.reading._plan
    assert disk._has_waiting == engine.connector.side.turns.has_waiting
    disk._has_waiting = lambda program: is_waiting
    tail = np.arange(10)
    disk.marks.is_saved[tail] = True
    assert disk.stays("any", -1e6, tail, 10) is is_waiting
    assert disk.stays("any", -0.5e-3, tail, 10), "it is needed before it would be back"


@pytest.mark.parametrize(("disk_slots", "stays"), [(30, True), (100, False)])
def test_what_a_disk_would_lose_before_it_is_wanted_stays_in_dram(
    disk_slots: int, stays: bool
) -> None:
    """Where the disk is about as large as DRAM, what it takes in meanwhile displaces there what
    DRAM gave up because the disk had it: then it is nowhere, and the disk made it worse."""
    engine = on_disk(num_slots=40, disk_slots=disk_slots)
    for number in range(3):
        run_turn(engine, f"a{number}", 200, seed=number, program=f"p{number}")
        park(engine)
    come_to_rest(engine)
    disk = engine.connector.side.tier.below
    tail = np.arange(10)
    disk.marks.is_saved[tail] = True
    assert disk.stays("p2", -1e6, tail, 10) is stays
    assert disk.stays("nobody's", -1e6, tail, 10) is stays


@pytest.mark.parametrize(("read", "passes"), [(0.1599, True), (0.1601, False)])
def test_what_is_worth_less_passes_through_dram_if_a_read_costs_less_than_a_prefill(
    read: float, passes: bool
) -> None:
    """Seconds of a block of 16 tokens, of which each takes 0.01 s."""
    engine = on_disk(costs=Costs(read=read))
    engine.idle(10.0)
    disk = engine.connector.side.tier.below
    disk._plan = disk.reading._plan
    assert disk.takes_all(engine.clock()) is passes


def test_what_a_store_takes_is_the_copy_and_a_step_and_not_the_prompt_beside_it() -> None:
    engine = small()
    costs = engine.connector.side.decider.costs
    for number in range(4):
        engine.add(f"p{number}", 600 + number, 2, seed=number, program=f"p{number}")
        engine.run_until_idle(until=lambda asked=f"p{number}": asked in engine.finish_reasons)
    engine.add("next", 700, 2, seed=9)
    engine.run_until_idle()
    assert 0.0 < costs.load_s(20) < 0.01, "a prompt takes ten times that"
