"""A tier that is given up while the server serves: no step waits for it, nothing is lost or told
twice, and the memory goes back."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.messages import StepPlan, TransferOutcome
from continuum_connector.worker import worker as module
from continuum_connector.worker.abi import PoolState, Status
from tests.fakes import FakeCopyEngine
from tests.unit.test_worker import Rig, load, store

NUM_SLOTS = 64


class SlowToClose(FakeCopyEngine):
    """Its pool grows until the test says otherwise, and who closes it waits until `may_close`."""

    def __init__(self) -> None:
        super().__init__(num_ready=4, is_growing=True)
        self.may_close = threading.Event()
        self.close_from = threading.main_thread()  # the steps' thread, which must not wait
        self.num_closes = 0
        self.error = ""

    def pool_state(self) -> PoolState:
        if self.error:
            raise TransferError(self.error)
        return super().pool_state()

    def close(self, timeout_s: float) -> None:
        self.num_closes += 1
        waits = threading.current_thread() is not self.close_from
        assert waits or self.may_close.is_set(), "a step closes the engine"
        assert self.may_close.wait(20.0)
        super().close(timeout_s)


class Given(Rig):
    """A rank with transfers 1 (load, for a), 2 (load, for b) and 3 (store) in flight."""

    engine: SlowToClose

    def __init__(self) -> None:
        super().__init__()
        loads = (load(1, "a", 3), load(2, "b", 5))
        self.worker.begin(StepPlan(loads=loads, stores=(store(3, 6),)))
        self.worker.submit_stores()
        self.tell()
        assert self.submitted() == [1, 2, 3]

    def make_engine(self) -> SlowToClose:
        return SlowToClose()

    def give_up(self) -> None:
        """The pool cannot be asked any more, and the next step sees it."""
        self.engine.error = "nothing is left"
        self.tell()

    def settle(self, *tags: int) -> None:
        for tag in tags:
            self.engine.settle(tag)
        self.tell()


class AtStart(Rig):
    """A rank whose pool cannot be asked from the start."""

    def make_engine(self) -> SlowToClose:
        engine = SlowToClose()
        engine.error = "nothing is left"
        return engine


def closers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "continuum-close"]


def join_closers() -> None:
    for each in closers():
        each.join(20.0)
        assert not each.is_alive()


@pytest.fixture
def closes_when_joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines close when somebody waits for the thread that closes them, and no sooner."""
    made: list[SlowToClose] = []
    begin, join = SlowToClose.__init__, threading.Thread.join

    def begin_and_note(engine: SlowToClose) -> None:
        begin(engine)
        made.append(engine)

    def release(thread: threading.Thread, timeout: float | None = None) -> None:
        for engine in made:
            engine.may_close.set()
        join(thread, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(SlowToClose, "__init__", begin_and_note)
        patched.setattr(threading.Thread, "join", release)
        yield
    for engine in made:
        engine.may_close.set()
    join_closers()


@pytest.fixture
def rig() -> Iterator[Given]:
    made = Given()
    yield made
    made.engine.may_close.set()
    made.worker.shutdown()
    assert closers() == []
    assert made.engine.num_closes == 1


def test_what_is_in_flight_settles_as_it_ends_and_then_the_engine_is_closed_elsewhere(
    rig: Given,
) -> None:
    rig.give_up()
    assert len(rig.tier_down) == 1
    assert (rig.outcomes, rig.finished, rig.engine.num_closes) == ({}, {}, 0)
    rig.settle(1)
    assert (rig.finished, rig.failed) == ({"a": 1}, set())
    rig.engine.fail(2)
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1, "b": 1}, {"b"}, {5})
    assert rig.engine.num_closes == 0, "the store still reads its blocks and writes its slots"
    rig.settle(3)
    [thread] = closers()
    for _ in range(3):
        rig.tell()  # while it closes
    rig.engine.may_close.set()
    thread.join(20.0)
    assert rig.engine.closed
    rig.tell()
    done = [tag for tag, outcome in rig.outcomes.items() if outcome.num_done]
    assert (done, rig.outcomes.keys()) == ([1, 3], {1, 2, 3})
    assert len(rig.tier_down) == 1


def test_new_orders_fail_at_once_whatever_is_in_flight_or_closing(rig: Given) -> None:
    rig.give_up()
    for number in (10, 20):
        orders = StepPlan(loads=(load(number, "n", number),), stores=(store(number + 1, number),))
        rig.worker.begin(orders)
        rig.worker.submit_stores()
        rig.tell()
        failed = TransferOutcome(num_failed=1, reasons=("no_tier",))
        assert rig.outcomes[number] == rig.outcomes[number + 1] == failed
        assert rig.finished["n"] == number // 10
        if number == 10:
            assert rig.outcomes.keys() == {10, 11}
            rig.settle(1, 2, 3)
            assert closers() != []
    assert rig.submitted() == [1, 2, 3]


def test_a_load_in_flight_can_be_cancelled_yet(rig: Given) -> None:
    rig.give_up()
    rig.worker.begin(StepPlan(cancels=(1, 3)))
    rig.tell()
    assert rig.engine.cancelled == [1, 3]
    rig.engine.settle(1, Status.CANCELLED)
    rig.tell()
    assert rig.outcomes[1].reasons == ("cancelled",)
    rig.settle(2, 3)
    rig.worker.begin(StepPlan(cancels=(2,)))
    rig.tell()  # to nobody


def not_one_block(rig: Given) -> None:
    rig.engine.num_ready, rig.engine.is_growing = 0, False


def cannot_be_asked(rig: Given) -> None:
    rig.engine.error = "this process is a fork"


def poison(rig: Given) -> None:
    rig.engine.poisoned = True
    rig.worker.begin(StepPlan(stores=(store(4, 7),)))
    rig.worker.submit_stores()


WAYS = pytest.mark.parametrize("break_it", [not_one_block, cannot_be_asked, poison])


@WAYS
def test_however_it_ends_no_step_closes_the_engine(break_it: Callable[[Given], None]) -> None:
    rig = Given()
    break_it(rig)
    rig.tell()
    assert (len(rig.tier_down), rig.engine.num_closes) == (1, 0)
    rig.settle(1, 2, 3)
    assert closers() != []
    rig.tell()
    rig.engine.may_close.set()
    join_closers()
    assert rig.engine.closed
    assert rig.outcomes.keys() - {4} == {1, 2, 3}
    rig.worker.shutdown()
    assert (rig.engine.num_closes, len(rig.tier_down)) == (1, 1)


@WAYS
def test_with_nothing_in_flight_it_is_closed_in_the_step_that_gives_it_up(
    break_it: Callable[[Given], None],
) -> None:
    rig = Given()
    rig.settle(1, 2, 3)
    break_it(rig)
    rig.tell()
    assert closers() != []
    rig.engine.may_close.set()
    join_closers()
    assert rig.engine.closed
    rig.tell()  # and the fake fails whoever asks it after close


def test_an_engine_that_dies_after_it_was_given_up_is_no_second_tier_that_goes(rig: Given) -> None:
    rig.give_up()
    rig.engine.poisoned = True
    rig.engine.fail(1, 700)
    rig.tell()
    rig.settle(2, 3)
    rig.tell()
    assert len(rig.tier_down) == 1
    assert "nothing is left" in rig.tier_down[0]


def test_at_start_it_is_waited_for(closes_when_joined: None) -> None:
    """Nobody is served yet, and what comes next at a start wants the memory."""
    rig = AtStart()
    assert rig.engine.closed
    assert (closers(), len(rig.tier_down)) == ([], 1)


# The stop of the server, in each state.


def test_a_stop_with_copies_in_flight_fails_them_once(rig: Given) -> None:
    rig.give_up()
    rig.settle(1)
    rig.engine.may_close.set()  # there it may wait
    rig.worker.shutdown()
    assert rig.engine.closed
    for _ in range(2):
        rig.tell()
        reasons = {tag: outcome.reasons for tag, outcome in rig.outcomes.items()}
        assert reasons == {1: (), 2: ("closed",), 3: ("closed",)}
        assert (rig.finished, rig.failed) == ({"a": 1, "b": 1}, {"b"})
        rig.worker.shutdown()
    rig.worker.begin(StepPlan(stores=(store(9, 9),)))
    rig.worker.submit_stores()
    rig.tell()
    assert rig.outcomes[9].reasons == ("closed",)


def test_a_stop_while_it_closes_waits_for_that(closes_when_joined: None, rig: Given) -> None:
    rig.give_up()
    rig.settle(1, 2, 3)
    rig.worker.shutdown()
    assert rig.engine.closed
    assert closers() == []
    rig.worker.shutdown()


def test_a_stop_after_it_was_closed_has_nothing_to_do(rig: Given) -> None:
    rig.give_up()
    rig.settle(1, 2, 3)
    rig.engine.may_close.set()
    join_closers()
    rig.worker.shutdown()
    rig.worker.shutdown()
    assert rig.engine.num_closes == 1


def test_an_exit_without_a_stop_waits_for_it() -> None:
    """From a thread whose children would be daemons; those die when the interpreter ends."""
    code = """
import os, threading
from tests.unit.test_giving_up import Given, SlowToClose

class Last(SlowToClose):
    def close(self, timeout_s):
        threading.main_thread().join()
        for _ in range(10_000):
            os.sched_yield()
        print("closed", flush=True)

class LastGiven(Given):
    def make_engine(self):
        return Last()

def give_up():
    rig = LastGiven()
    rig.give_up()
    rig.settle(1, 2, 3)

thread = threading.Thread(target=give_up, daemon=True)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("closed\n", 0), done.stderr


# What may go wrong meanwhile.


def test_without_a_thread_to_be_had_the_next_step_tries_again(
    rig: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        rig.give_up()
        rig.settle(1, 2, 3)
        rig.tell()
        assert (closers(), rig.engine.num_closes) == ([], 0)
    rig.tell()
    assert closers() != []


def test_an_engine_that_does_not_close_is_told_of(
    rig: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def close(_timeout_s: float) -> None:
        rig.engine.num_closes += 1
        raise TransferError("the host pool stays")

    monkeypatch.setattr(rig.engine, "close", close)
    monkeypatch.setattr(module.logger, "warning", lambda text, *parts: told.append(text % parts))
    rig.give_up()
    rig.settle(1, 2, 3)
    join_closers()
    assert told[1:] == ["the copy engine did not close: the host pool stays"]
    rig.tell()
