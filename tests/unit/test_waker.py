"""Waker: on time, not early, and no thread before there is something to wait for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from continuum_connector.scheduler.waker import Waker

FAR = 1e6  # seconds; nothing in these tests waits for it


class Bell:
    """Notes when it rang."""

    def __init__(self) -> None:
        self.rang: list[float] = []
        self._event = threading.Event()

    def __call__(self) -> None:
        self.rang.append(time.monotonic())
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(60), "nobody rang"
        self._event.clear()


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def waker(bell: Bell) -> Iterator[Waker]:
    made = Waker(bell)
    yield made
    made.close()
    assert made._thread is None or not made._thread.is_alive()


def test_there_is_no_thread_until_a_time_is_set(waker: Waker) -> None:
    waker.set(math.inf)
    assert waker._thread is None


def test_it_rings_at_the_time_and_not_before(waker: Waker, bell: Bell) -> None:
    at = time.monotonic() + 0.02
    waker.set(at)
    bell.wait()
    assert bell.rang[0] >= at


def test_a_time_in_the_past_rings_at_once_and_only_once(waker: Waker, bell: Bell) -> None:
    waker.set(time.monotonic() - 5)
    bell.wait()
    waker.set(time.monotonic() + FAR)
    waker.close()
    assert len(bell.rang) == 1


def test_an_earlier_time_overtakes_a_later_one(waker: Waker, bell: Bell) -> None:
    waker.set(time.monotonic() + FAR)
    waker.set(time.monotonic())
    bell.wait()


def test_a_later_time_replaces_an_earlier_one() -> None:
    """The thread wakes at the earlier time, sees that it moved, and rings at the later."""
    was_in_time = False
    while not was_in_time:  # or the earlier one came before it was replaced
        bell = Bell()
        waker = Waker(bell)
        first = time.monotonic() + 0.01
        waker.set(first)
        later = first + 0.03
        waker.set(later)
        was_in_time = time.monotonic() < first
        bell.wait()
        waker.close()
    assert bell.rang[0] >= later


def test_it_can_be_set_again_after_it_rang(waker: Waker, bell: Bell) -> None:
    for _ in range(3):
        waker.set(time.monotonic())
        bell.wait()
    assert len(bell.rang) == 3


def test_it_can_be_set_from_the_bell_itself_a_thread_later(bell: Bell) -> None:
    """As the engine does: woken, it sets the next deadline from its own thread."""
    waker = Waker(bell)
    waker.set(time.monotonic())
    bell.wait()
    engine = threading.Thread(target=lambda: waker.set(time.monotonic()))
    engine.start()
    bell.wait()
    engine.join()
    waker.close()


def test_each_has_a_time_of_its_own(waker: Waker, bell: Bell) -> None:
    """A later time of one does not replace the earlier one of another."""
    waker.set(time.monotonic() + 0.02)
    waker.set(time.monotonic() + FAR, "tier")
    bell.wait()
    waker.set(time.monotonic(), "tier")
    bell.wait()
    assert len(bell.rang) == 2


def test_closing_stops_the_thread_however_long_it_would_have_waited(
    waker: Waker, bell: Bell
) -> None:
    waker.set(time.monotonic() + FAR)
    waker.close()
    assert waker._thread is not None
    assert not waker._thread.is_alive()
    waker.close()
    assert bell.rang == []


def test_without_an_input_queue_nothing_is_woken() -> None:
    before = threading.active_count()
    waker = Waker(None)
    waker.set(0.0)
    assert threading.active_count() == before
    waker.close()
