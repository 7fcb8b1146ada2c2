"""How long blocks stay in DRAM: robust, and forgotten when nothing has to leave any more."""

from __future__ import annotations

import math

from continuum_connector.scheduler.residence import MAX_DOUBLINGS, MIN_QUIET_S, NUM_AGES, Residence


def test_it_is_infinite_until_something_leaves() -> None:
    assert Residence().seconds(5.0) == math.inf


def test_one_odd_chain_changes_nothing() -> None:
    residence = Residence()
    for now, age in enumerate([30.0, 31.0, 4000.0, 29.0, 30.0]):
        residence.evicted(age, float(now))
    assert residence.seconds(4.0) == 30.0


def test_it_follows_a_shift() -> None:
    residence = Residence()
    for now in range(NUM_AGES):
        residence.evicted(100.0, float(now))
    for now in range(NUM_AGES, NUM_AGES + NUM_AGES // 2 + 1):
        residence.evicted(10.0, float(now))
    assert residence.seconds(float(NUM_AGES + NUM_AGES // 2)) == 10.0


def test_while_nothing_leaves_it_grows_back_to_infinity() -> None:
    residence = Residence()
    residence.evicted(60.0, now=100.0)
    assert residence.seconds(100.0) == 60.0
    assert residence.seconds(160.0) == 120.0
    assert residence.seconds(100.0 + 60.0 * MAX_DOUBLINGS) == math.inf
    times = [residence.seconds(100.0 + t) for t in range(500)]
    assert times == sorted(times)


def test_a_pause_between_bursts_is_no_end_of_pressure() -> None:
    residence = Residence()
    residence.evicted(0.1, now=0.0)
    assert residence.seconds(MIN_QUIET_S / 2) < 0.15


def test_new_pressure_starts_from_what_it_sees() -> None:
    residence = Residence()
    for _ in range(NUM_AGES):
        residence.evicted(2.0, now=0.0)
    residence.evicted(90.0, now=1000.0)
    assert residence.seconds(1000.0) == 90.0
