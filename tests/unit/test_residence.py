"""How long blocks stay in DRAM: by the rate at which they leave, forgotten when none has to."""

from __future__ import annotations

import math

import pytest

from continuum_connector.scheduler.tiers.chains import LEAST_S, Residence

SLOTS = 1000


def leaving(residence: Residence, rate: float, since: float, until: float) -> None:
    """Blocks leave, `rate` of them per second."""
    for n in range(round((until - since) * rate)):
        residence.evicted(1, SLOTS, since + n / rate)


def test_it_is_infinite_until_something_leaves() -> None:
    assert Residence().seconds(5.0) == math.inf


def test_it_is_the_slots_over_the_rate_at_which_blocks_leave() -> None:
    residence = Residence()
    leaving(residence, 20.0, 0.0, 200.0)
    assert residence.seconds(200.0) == pytest.approx(SLOTS / 20.0, rel=0.05)


def test_how_old_those_are_that_leave_does_not_matter() -> None:
    """Where the newest leave first, as under cyclic use, the others stay: 990 of 1,000 slots are
    never asked for, and one block in a second comes and goes."""
    residence = Residence()
    leaving(residence, 1.0, 0.0, 3000.0)
    assert residence.seconds(3000.0) == pytest.approx(SLOTS, rel=0.05)


def test_it_follows_a_shift_within_one_turnover() -> None:
    residence = Residence()
    leaving(residence, 10.0, 0.0, 300.0)
    leaving(residence, 100.0, 300.0, 312.0)
    assert residence.seconds(312.0) == pytest.approx(SLOTS / 100.0, rel=0.1)


def test_when_nothing_leaves_for_as_long_as_a_block_stays_the_pressure_is_over() -> None:
    residence = Residence()
    leaving(residence, 20.0, 0.0, 200.0)
    assert residence.seconds(240.0) < math.inf
    assert residence.seconds(300.0) == math.inf


def test_a_pause_between_bursts_is_no_end_of_pressure() -> None:
    residence = Residence()
    for n in range(10):  # a tenth of a second each
        residence.evicted(SLOTS, SLOTS, n / 10)
    assert residence.seconds(1.0 + LEAST_S / 2) < math.inf


def test_new_pressure_starts_from_what_it_sees() -> None:
    residence = Residence()
    leaving(residence, 1000.0, 0.0, 20.0)
    leaving(residence, 2.0, 5000.0, 5600.0)
    assert residence.seconds(5600.0) == pytest.approx(SLOTS / 2.0, rel=0.1)


def test_its_memory_is_bounded() -> None:
    residence = Residence()
    leaving(residence, 50.0, 0.0, 1000.0)
    assert len(residence._parts) < 40
