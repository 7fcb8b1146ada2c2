"""The lab's PCIe, against cases computed by hand: 10 GB a second one way, 10 both."""

from __future__ import annotations

import math

import pytest

from bench.sim.bus import Bus, Way

GB = 1e9


def bus(one_way: float = 10 * GB, both: float = 10 * GB, latency_s: float = 0.0) -> Bus:
    return Bus(one_way, both, latency_s)


def test_one_copy_takes_its_bytes_over_the_rate() -> None:
    link = bus()
    copy = link.submit(Way.LOAD, 20 * GB, now=1.0)
    assert link.next_done() == pytest.approx(3.0)
    link.advance(2.9)
    assert math.isinf(copy.done)
    link.advance(5.0)
    assert copy.done == pytest.approx(3.0)
    assert math.isinf(link.next_done())
    assert link.num_bytes == {Way.LOAD: 20 * GB, Way.STORE: 0.0}


def test_copies_of_one_direction_follow_each_other() -> None:
    link = bus()
    first = link.submit(Way.STORE, 10 * GB, now=0.0)
    second = link.submit(Way.STORE, 10 * GB, now=0.5)
    link.advance(10.0)
    assert (first.done, second.done) == (pytest.approx(1.0), pytest.approx(2.0))


def test_both_directions_share_what_the_link_carries() -> None:
    """0 to 1 s: each way 5 GB/s. Then the store alone has 10 GB/s for its last 5 GB."""
    link = bus()
    load = link.submit(Way.LOAD, 5 * GB, now=0.0)
    store = link.submit(Way.STORE, 10 * GB, now=0.0)
    link.advance(10.0)
    assert (load.done, store.done) == (pytest.approx(1.0), pytest.approx(1.5))


def test_a_link_that_carries_both_ways_in_full_slows_neither() -> None:
    link = bus(both=20 * GB)
    load = link.submit(Way.LOAD, 10 * GB, now=0.0)
    store = link.submit(Way.STORE, 10 * GB, now=0.0)
    link.advance(10.0)
    assert (load.done, store.done) == (pytest.approx(1.0), pytest.approx(1.0))


def test_bytes_that_are_not_computed_yet_do_not_flow_and_hold_up_those_behind_them() -> None:
    """The load has the link to itself until 2 s; the second store waits behind the first."""
    link = bus()
    first = link.submit(Way.STORE, 10 * GB, now=0.0, not_before=2.0)
    second = link.submit(Way.STORE, 10 * GB, now=0.0)
    load = link.submit(Way.LOAD, 20 * GB, now=0.0)
    link.advance(10.0)
    assert load.done == pytest.approx(2.0)
    assert (first.done, second.done) == (pytest.approx(3.0), pytest.approx(4.0))


def test_each_copy_pays_the_latency_and_does_not_count_it_as_bytes() -> None:
    link = bus(latency_s=0.25)
    copy = link.submit(Way.LOAD, 10 * GB, now=0.0)
    link.advance(10.0)
    assert copy.done == pytest.approx(1.25)
    assert copy.num_bytes == link.num_bytes[Way.LOAD] == 10 * GB


@pytest.mark.parametrize("step", [0.01, 0.3, 100.0])
def test_how_often_one_looks_changes_nothing(step: float) -> None:
    link, now = bus(latency_s=50e-6), 0.0
    copies = [
        link.submit(Way.LOAD, 3 * GB, 0.0),
        link.submit(Way.STORE, 7 * GB, 0.0, not_before=0.1),
        link.submit(Way.LOAD, 1 * GB, 0.0),
    ]
    while now < 5.0:
        now += step
        link.advance(now)
    # 0.1 s alone, then 5 GB/s each way: 2 GB + 1 GB of loads; 3 GB of the store; 4 GB alone
    assert [copy.done for copy in copies] == pytest.approx([0.5, 1.1, 0.7], abs=1e-3)


def test_next_done_is_when_it_is_done() -> None:
    """However far from zero time is: rounding must not leave a byte that never arrives."""
    link, now = bus(), 1e6
    for num_bytes in (1.0, 3.0, 12_345.0, 7 * GB):
        copy = link.submit(Way.LOAD, num_bytes, now)
        for _ in range(3):
            now = max(now, link.next_done()) if math.isinf(copy.done) else now
            link.advance(now)
        assert copy.done == now
