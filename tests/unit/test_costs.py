"""Queueing, memoryfulness, price, the step clock, and the facade over all costs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from continuum_connector.costs import (
    LONG_PREFIX,
    MAX_AGE_S,
    MAX_IN_FLIGHT,
    MIN_PROGRAMS,
    TIME_CONSTANT_S,
    WINDOW,
    Costs,
    Level,
    Memoryfulness,
    Queueing,
    StepClock,
    Work,
)
from continuum_connector.observe.account import Account


# --- queueing -----------------------------------------------------------------------------
def test_queueing_is_zero_until_an_evicted_turn_has_waited() -> None:
    costs = Costs(512)
    costs.waited(5.0, was_evicted=False, now=1.0)
    assert costs.queueing_s(1.0) == 0.0
    costs.waited(3.0, was_evicted=True, now=2.0)
    costs.waited(1.0, was_evicted=True, now=3.0)
    assert costs.queueing_s(3.0) == 2.0


def test_queueing_is_the_mean_of_the_last_turns_and_of_the_last_minutes() -> None:
    queueing = Queueing()
    for number in range(3 * WINDOW):
        queueing.waited(float(number), float(number))
    assert queueing.mean(300.0) == pytest.approx(np.mean(range(2 * WINDOW, 3 * WINDOW)))
    assert queueing.mean(250.0 + MAX_AGE_S) == pytest.approx(np.mean(range(250, 300)))
    assert queueing.mean(300.0 + MAX_AGE_S) == 0.0


def test_rounding_does_not_outlive_the_waits_it_came_from() -> None:
    queueing = Queueing()
    queueing.waited(1e16, 0.0)
    queueing.waited(1.0, 0.0)
    assert queueing.mean(2 * MAX_AGE_S) == 0.0
    queueing.waited(5.0, 2 * MAX_AGE_S)
    assert queueing.mean(2 * MAX_AGE_S) == 5.0


# --- memoryfulness ------------------------------------------------------------------------
def eta_of(lengths: list[int]) -> float:
    memory = Memoryfulness()
    for num_turns in lengths:
        memory.program_over(num_turns)
    return memory.eta


def brute_force(lengths: list[int]) -> float:
    served = [k for n in lengths for k in range(1, n + 1)]
    left = [n - k for n in lengths for k in range(1, n + 1)]
    return float(-np.corrcoef(served, left)[0, 1])


@pytest.mark.parametrize("seed", range(10))
def test_eta_is_the_correlation_over_every_turn(seed: int) -> None:
    lengths = [random.Random(seed * 100 + i).randrange(1, 30) for i in range(MIN_PROGRAMS)]
    assert eta_of(lengths) == pytest.approx(brute_force(lengths), abs=0.02)  # older ones fade


def test_eta_of_equally_long_programs_is_one() -> None:
    assert eta_of([12] * 50) == pytest.approx(1.0)
    assert eta_of([1] * 50) == 1.0
    assert eta_of([10**6] * 50) == pytest.approx(1.0)


def test_eta_of_memoryless_programs_is_about_zero() -> None:
    lengths = np.random.default_rng(0).geometric(0.1, 3000).tolist()
    assert abs(eta_of(lengths)) < 0.1


def test_eta_of_a_heavy_tail_is_negative() -> None:
    """The longer a program has run, the more is still to come."""
    lengths = [2] * 300 + [3] * 100 + [200] * 2
    random.Random(1).shuffle(lengths)
    mixed = [1 if n < 4 else n for n in lengths for _ in range(2)]
    heavy = (np.random.default_rng(3).pareto(1.1, 2000) + 1).astype(int).clip(1, 3000).tolist()
    assert eta_of(heavy) < -0.1
    assert -1.0 <= eta_of(mixed) <= 1.0


def test_eta_is_one_until_enough_programs_are_over() -> None:
    memory = Memoryfulness()
    for number in range(MIN_PROGRAMS - 1):
        memory.program_over(number % 9 + 1)
        memory.program_over(0)  # says nothing
        assert (memory.is_known, memory.eta) == (False, 1.0)
    memory.program_over(3)
    assert memory.is_known
    assert memory.eta < 1.0


def test_eta_follows_a_new_kind_of_program() -> None:
    assert eta_of(np.random.default_rng(0).geometric(0.1, 500).tolist() + [8] * 5000) > 0.9


def test_short_programs_do_not_drive_out_what_long_ones_taught() -> None:
    """A thousand single turns weigh as much as a hundred agents of ten."""
    lengths = [10 + number % 5 for number in range(200)] + [1] * 1000
    assert eta_of(lengths) == pytest.approx(brute_force(lengths), abs=0.1)


# --- price --------------------------------------------------------------------------------
def test_price_is_zero_while_nobody_waits() -> None:
    costs = Costs(512)
    costs.footprint(100)
    assert costs.price(1000.0) == 0.0
    costs.unblocked(1001.0)
    assert costs.price(1e6) == 0.0


def test_price_is_the_share_of_time_somebody_waits_over_the_blocks_of_a_turn() -> None:
    costs = Costs(512)
    for _ in range(10):
        costs.footprint(50)
    now = 0.0
    while now < 20 * TIME_CONSTANT_S:  # waits 1 s of every 4
        costs.blocked(now)
        costs.blocked(now + 0.5)
        costs.unblocked(now + 1.0)
        now += 4.0
    assert costs.price(now) == pytest.approx(0.25 / 50, rel=0.1)


def test_price_rises_and_falls_with_its_time_constant() -> None:
    costs = Costs(512)
    costs.blocked(0.0)
    assert costs.share_blocked(TIME_CONSTANT_S) == pytest.approx(1 - math.exp(-1))
    assert costs.share_blocked(100 * TIME_CONSTANT_S) == pytest.approx(1.0)
    costs.unblocked(100 * TIME_CONSTANT_S)
    assert costs.share_blocked(101 * TIME_CONSTANT_S) == pytest.approx(math.exp(-1))
    assert costs.share_blocked(106 * TIME_CONSTANT_S) == 0.0  # e^-6 is nobody


def test_a_level_is_averaged_over_its_time_constant() -> None:
    level = Level(10.0)
    level.set(3, 0.0)
    assert level.mean(0.0) == 0.0
    assert level.mean(10.0) == pytest.approx(3 * (1 - math.exp(-1)))
    assert level.mean(1000.0) == pytest.approx(3.0)
    level.set(0, 1000.0)
    assert level.mean(1010.0) == pytest.approx(3 / math.e)


def test_a_clock_that_stands_still_is_no_waiting_time() -> None:
    costs = Costs(512)
    for _ in range(100):
        costs.blocked(5.0)
        costs.unblocked(5.0)
    assert costs.share_blocked(5.0) == 0.0


def test_mean_blocks_is_a_mean_first_and_follows_later() -> None:
    costs = Costs(512)
    assert costs.mean_blocks == 1.0
    for num_blocks in (10, 20, 30):
        costs.footprint(num_blocks)
    assert costs.mean_blocks == pytest.approx(20.0)
    for _ in range(1000):
        costs.footprint(100)
    assert costs.mean_blocks == pytest.approx(100.0, rel=0.01)
    costs.footprint(0)
    assert costs.mean_blocks > 1.0


# --- the step clock -----------------------------------------------------------------------
def test_sync_steps_take_from_schedule_to_output() -> None:
    clock = StepClock()
    clock.scheduled(Work(num_new=10), 1.0)
    assert clock.done(1.5) == (Work(num_new=10), 0.5)
    clock.scheduled(Work(num_decodes=1), 2.0)  # idle in between does not count
    assert clock.done(2.25) == (Work(num_decodes=1), 0.25)


def test_async_steps_begin_when_the_one_before_is_done() -> None:
    clock = StepClock()
    clock.scheduled(Work(num_new=1), 1.0)
    clock.scheduled(Work(num_new=2), 1.1)
    assert clock.done(2.0) == (Work(num_new=1), 1.0)
    clock.scheduled(Work(num_new=3), 2.1)
    assert clock.done(2.5) == (Work(num_new=2), 0.5)
    assert clock.done(2.9) == (Work(num_new=3), pytest.approx(0.4))


def test_empty_steps_have_no_time() -> None:
    clock = StepClock()
    assert clock.done(0.5) is None  # nothing was scheduled
    clock.scheduled(Work(), 1.0)
    clock.scheduled(Work(num_new=5), 1.0)
    assert clock.done(3.0) is None
    assert clock.done(4.0) == (Work(num_new=5), 1.0)
    clock.scheduled(Work(num_new=5), 4.0)
    assert clock.done(4.0) is None  # a clock too coarse to see it


def test_outputs_that_never_come_do_not_pile_up() -> None:
    clock = StepClock()
    for number in range(10 * MAX_IN_FLIGHT):
        clock.scheduled(Work(num_new=1), float(number))
    assert len(clock._in_flight) == MAX_IN_FLIGHT


def test_work_tells_prompts_from_decodes_with_and_without_drafts() -> None:
    scheduled = {"prompt": 512, "decode": 1, "drafting": 4, "short": 2}
    computed = {"short": 0, "prompt": 1000, "decode": 300, "drafting": 700}
    drafts = {"drafting": [7, 8, 9]}
    work = Work.of(scheduled, len(scheduled), computed.__getitem__, sum(computed.values()), drafts)
    assert work == Work(514, 512 * 1256.0 + 2 * 1.0, 2, 1000)
    assert not Work.of({}, 0, computed.__getitem__, 0, {})


# --- the facade ---------------------------------------------------------------------------
def taught() -> Costs:
    costs = Costs(512)
    for number in range(1, 200):
        work = Work(num_new=number * 7 % 500 + 2, num_decodes=number % 4)
        costs.step(work, 0.01 + work.num_new * 1e-4)
        costs.loaded(number, 0.002 + number * 1e-5)
        costs.stored(number, 0.004 + number * 1e-5)
        costs.read(number, 0.006 + number * 1e-5)
        costs.program_over(number % 7 + 1)
    return costs


def test_with_nothing_known_everything_is_free_and_programs_are_equally_long() -> None:
    costs = Costs(512)
    assert costs.prefill_s(1000, 500) == costs.load_s(10) == 0.0
    assert costs.queueing_s(0.0) == costs.price(0.0) == 0.0
    assert (costs.eta, costs.mean_blocks) == (1.0, 1.0)


def test_every_number_is_a_metric() -> None:
    costs, account = taught(), Account()
    costs.blocked(0.0)
    costs.footprint(4)
    costs.waited(2.0, was_evicted=True, now=10.0)
    for gauge in costs.gauges(10.0):
        account.gauge(*gauge)
    per_token = "prefill_seconds_per_token"
    assert account.total(per_token, "0") == pytest.approx(1.2e-4, rel=0.02)
    assert account.total(per_token, str(LONG_PREFIX)) >= 1.2e-4 * 0.98
    assert account.total("load_seconds_per_block") == pytest.approx(1.2e-5, rel=0.02)
    assert account.total("queueing_seconds") == 2.0
    assert account.total("memoryfulness") == costs.eta < 1.0
    assert account.total("block_second_price") == costs.price(10.0) > 0.0
    assert account.total("costs_known") == 3


def test_before_any_copy_was_seen_a_block_takes_what_its_bytes_take_on_a_slow_bus() -> None:
    costs = Costs(512)
    assert costs.load_s(10) == 0.0
    costs.assume(block_bytes=2 * 2**20)
    assert 10 * 2 * 2**20 / 64e9 < costs.load_s(10) < 0.01
    for number in (10, 20, 30, 40):
        costs.stored(number, 0.1 * number)
    assert costs.load_s(10) == pytest.approx(1.0, rel=0.05)  # as stores do
    for number in (10, 20, 30, 40):
        costs.loaded(number, 0.2 * number)
    assert costs.load_s(10) == pytest.approx(2.0, rel=0.05)


def test_two_steps_with_a_prompt_give_a_first_rate_that_errs_on_the_slow_side() -> None:
    costs = Costs(512)
    costs.step(Work(num_new=256, pairs=256 * 128.0), 5.0)  # the first one compiles
    assert costs.prefill_s(1000) == 0.0
    costs.step(Work(num_new=256, pairs=256 * 128.0, num_decodes=3), 0.3)
    costs.step(Work(num_new=16, pairs=128.0), 0.001)  # too short to tell
    assert costs.prefill_s(1000) == pytest.approx(1000 * 0.3 / 256)
