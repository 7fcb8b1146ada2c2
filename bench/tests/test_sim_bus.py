"""The lab's PCIe and disk, against cases computed by hand: 10 GB a second in all; 8 GB a second
read, 4 written."""

from __future__ import annotations

import math

import pytest

from bench.sim.bus import Bus, Disk, Way

GB = 1e9


def bus(latency_s: float = 0.0) -> Bus:
    return Bus(10 * GB, latency_s)


def test_one_copy_takes_its_bytes_over_the_rate_and_the_latency_which_is_no_bytes() -> None:
    link = bus(latency_s=0.25)
    copy = link.submit(Way.LOAD, 20 * GB, now=1.0)
    assert link.next_done() == pytest.approx(3.25)
    link.advance(3.2)
    assert math.isinf(copy.done)
    link.advance(5.0)
    assert copy.done == pytest.approx(3.25)
    assert math.isinf(link.next_done())
    assert link.num_bytes == {Way.LOAD: 20 * GB, Way.STORE: 0.0}


LOAD, STORE = Way.LOAD, Way.STORE


@pytest.mark.parametrize(
    ("copies", "done"),
    [
        # of one direction they follow each other
        ([(STORE, 10, 0.0), (STORE, 10, 0.5)], (1.0, 2.0)),
        # 0 to 1 s: each way 5 GB/s; then the store alone has 10 for its last 5 GB
        ([(LOAD, 5, 0.0), (STORE, 10, 0.0)], (1.0, 1.5)),
    ],
)
def test_directions_share_what_the_link_carries(
    copies: list[tuple[Way, int, float]], done: tuple[float, float]
) -> None:
    link = bus()
    sent = [link.submit(way, size * GB, now) for way, size, now in copies]
    link.advance(10.0)
    assert [copy.done for copy in sent] == pytest.approx(done)


def test_bytes_that_are_not_computed_yet_do_not_flow_and_hold_up_those_behind_them() -> None:
    """The load has the link to itself until 2 s; the second store waits behind the first."""
    link = bus()
    first = link.submit(Way.STORE, 10 * GB, now=0.0, not_before=2.0)
    second = link.submit(Way.STORE, 10 * GB, now=0.0)
    load = link.submit(Way.LOAD, 20 * GB, now=0.0)
    link.advance(10.0)
    assert load.done == pytest.approx(2.0)
    assert (first.done, second.done) == (pytest.approx(3.0), pytest.approx(4.0))


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


# --- a disk -----------------------------------------------------------------------------
def disk(reads_first: bool = False, latency_s: float = 0.0) -> Disk:
    made = Disk(8 * GB, 4 * GB, latency_s)
    made.reads_first = reads_first
    return made


def test_a_disk_that_reads_and_writes_gives_each_half_of_its_time() -> None:
    """0 to 2 s: 4 GB/s and 2 GB/s. Then the write alone has 4 GB/s for its last 4 GB."""
    drive = disk()
    read = drive.submit(Way.READ, 8 * GB, now=0.0)
    write = drive.submit(Way.WRITE, 8 * GB, now=0.0)
    assert drive.next_done() == pytest.approx(2.0)
    drive.advance(10.0)
    assert (read.done, write.done) == (pytest.approx(2.0), pytest.approx(3.0))


def test_where_reads_go_first_a_write_waits_and_goes_on() -> None:
    """The write has 0 to 1 s and, behind the reads, 2 to 3 s."""
    drive = disk(reads_first=True)
    write = drive.submit(Way.WRITE, 8 * GB, now=0.0)
    read = drive.submit(Way.READ, 8 * GB, now=1.0)
    assert drive.next_done() == pytest.approx(2.0)
    drive.advance(2.5)
    assert read.done == pytest.approx(2.0)
    assert drive.next_done() == pytest.approx(3.0)
    drive.advance(10.0)
    assert write.done == pytest.approx(3.0)


def test_what_has_not_begun_can_be_taken_back_and_nothing_else() -> None:
    """Of copies that look alike it is the one that is meant."""
    drive = disk(latency_s=0.25)
    begun, other, unwanted = (drive.submit(Way.READ, 8 * GB, now=0.0) for _ in range(3))
    drive.advance(0.5)
    assert [drive.cancel(each) for each in (begun, unwanted, unwanted)] == [False, True, False]
    drive.advance(10.0)
    assert (begun.done, other.done) == pytest.approx((1.25, 2.5))
    assert unwanted.done == math.inf
    assert math.isinf(drive.next_done())
    assert drive.num_bytes == {Way.READ: 16 * GB, Way.WRITE: 0.0}
