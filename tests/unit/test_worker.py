"""ContinuumWorker over FakeCopyEngine: whatever hooks arrive, each order is done exactly once."""

from __future__ import annotations

import subprocess
import sys
import timeit
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import LoadOrder, StepPlan, StoreOrder, TransferOutcome
from continuum_connector.worker import tier as condition
from continuum_connector.worker.abi import CONFLICT, CORRUPT, Direction, Region, Status
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.tier import num_slots_for
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import BLOCK_BYTES, BLOCK_SECONDS, FakeClock, FakeCopyEngine, poll

LAYOUT = Layout((Region(4096, 1000, 0, 1000),), 100, 1000, "cpu", 0)
CONFIG = ContinuumConfig(dram_bytes=64_000)
STREAM = 77


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def load(transfer_id: int, request_id: str, *blocks: int) -> LoadOrder:
    return LoadOrder(transfer_id, request_id, ids(*blocks), ids(*blocks))


def store(transfer_id: int, *blocks: int) -> StoreOrder:
    return StoreOrder(transfer_id, ids(*blocks), ids(*blocks))


class Rig:
    """A worker, its engine, and everything it has told so far."""

    def __init__(self, hold: bool = True, config: ContinuumConfig = CONFIG) -> None:
        self.engine = self.make_engine()
        self.clock = FakeClock()
        self.engine.hold = hold
        self.made: list[tuple[Layout, int]] = []
        self.worker = ContinuumWorker(
            self._make, config, current_stream=lambda: STREAM, clock=self.clock
        )
        self.worker.register(LAYOUT)
        self.ready_slots: list[dict[int, int]] = []
        self.finished: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.bad: set[int] = set()
        self.outcomes: dict[int, TransferOutcome] = {}
        self.tier_down: list[str] = []
        self.take_report()

    def make_engine(self) -> FakeCopyEngine:
        return FakeCopyEngine()

    def _make(self, layout: Layout, num_slots: int) -> FakeCopyEngine:
        self.made.append((layout, num_slots))
        self.engine.slot_bytes = layout.slot_bytes
        self.engine.num_ready = self.engine.num_ready or num_slots
        return self.engine

    def poll(self) -> None:
        finished, failed = poll(self.worker)
        bad = self.worker.take_bad_blocks()
        assert failed <= finished
        assert bool(bad) == bool(failed)
        self.finished.update(finished)
        self.failed |= failed
        self.bad |= bad

    def take_report(self) -> None:
        report = self.worker.take_report()
        if report is None:
            return
        assert not report.is_empty
        for transfer_id, outcome in report.outcomes.items():
            assert transfer_id not in self.outcomes, "settled twice"
            assert outcome.num_ranks == 1
            self.outcomes[transfer_id] = outcome
        if report.ready_slots:
            self.ready_slots.append(report.ready_slots)
        if report.tier_down:
            self.tier_down.append(report.tier_down)

    def tell(self) -> None:
        self.poll()
        self.take_report()

    def submitted(self) -> list[int]:
        return [call.tag for call in self.engine.log]


# One step, hook by hook.


def test_a_load_is_submitted_behind_the_current_stream_and_reported_once():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3, 4),)))
    assert rig.submitted() == []
    rig.worker.start_loads()
    rig.worker.start_loads()
    [call] = rig.engine.log
    assert (call.direction, call.blocks, call.slots) == (Direction.LOAD, (3, 4), (3, 4))
    assert (call.tag, call.after_stream) == (1, STREAM)
    rig.tell()
    assert not rig.finished
    rig.engine.settle(1)
    rig.tell()
    rig.tell()
    assert rig.finished == {"a": 1}
    assert not rig.failed
    done = TransferOutcome(num_done=1, num_bytes=2 * BLOCK_BYTES, seconds=2 * BLOCK_SECONDS)
    assert rig.outcomes == {1: done}


def test_stores_wait_for_submit_stores_and_not_for_their_copies():
    rig = Rig()
    rig.worker.begin(StepPlan(stores=(store(1, 5), store(2, 6))))
    rig.worker.start_loads()
    poll(rig.worker)  # with speculative decoding before the draft model has written its blocks
    assert rig.submitted() == []
    rig.worker.submit_stores()
    assert rig.submitted() == [1, 2]
    assert {call.after_stream for call in rig.engine.log} == {STREAM}
    assert rig.engine.waited == []
    assert rig.worker.take_report() is None


def test_loads_leave_before_stores_when_no_hook_but_submit_stores_comes():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(2, "a", 1),), stores=(store(1, 5),)))
    rig.worker.submit_stores()
    assert rig.submitted() == [2, 1]


def test_loads_leave_with_poll_when_start_loads_never_comes():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 1),)))
    rig.poll()
    assert rig.submitted() == [1]


def test_stores_of_a_step_without_wait_for_save_leave_with_the_next_plan():
    rig = Rig()
    rig.worker.begin(StepPlan(stores=(store(1, 5),)))
    rig.poll()
    rig.worker.begin(StepPlan())
    assert rig.submitted() == [1]


def test_a_plan_bound_twice_is_one_plan():
    rig = Rig()
    plan = StepPlan(loads=(load(1, "a", 1),), stores=(store(2, 5),))
    rig.worker.begin(plan)
    rig.worker.begin(plan)
    rig.worker.start_loads()
    rig.worker.begin(plan)
    rig.worker.submit_stores()
    rig.worker.begin(plan)
    rig.worker.submit_stores()
    assert rig.submitted() == [1, 2]


def test_cancels_go_to_transfers_in_flight_only():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 1), load(2, "b", 2))))
    rig.worker.start_loads()
    rig.engine.settle(2)
    rig.tell()
    rig.worker.begin(StepPlan(cancels=(1, 2, 99)))
    rig.worker.start_loads()
    assert rig.engine.cancelled == [1]
    rig.engine.settle_all()
    rig.tell()
    assert rig.outcomes[1] == TransferOutcome(num_failed=1, reasons=("cancelled",))
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1, "b": 1}, {"a"}, {1})


def test_a_cancel_that_the_engine_refuses_is_no_failure():
    rig = in_flight()

    def refuse(_tag: int) -> None:
        raise TransferError("the driver failed")

    rig.engine.cancel = refuse  # type: ignore[method-assign]
    rig.worker.begin(StepPlan(cancels=(1,)))
    rig.worker.start_loads()
    rig.engine.settle_all()
    rig.tell()
    assert not rig.failed


# Failure is an outcome.


def test_a_failed_load_names_its_request_and_its_blocks():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3, 4), load(2, "b", 5))))
    rig.worker.start_loads()
    rig.engine.fail(1)
    rig.engine.settle(2)
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1, "b": 1}, {"a"}, {3, 4})
    assert rig.outcomes[1] == TransferOutcome(num_failed=1, reasons=("driver",))


def test_what_the_engine_says_of_a_failed_copy_is_its_reason():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3, 4), load(2, "b", 5), load(3, "c", 6))))
    rig.worker.start_loads()
    rig.engine.fail(1, CORRUPT)
    rig.engine.fail(2, 2)
    rig.engine.fail(3, CONFLICT)
    rig.tell()
    assert (rig.failed, rig.bad) == ({"a", "b", "c"}, {3, 4, 5, 6})
    assert rig.outcomes[1] == TransferOutcome(num_failed=1, reasons=("corrupt",))
    assert rig.outcomes[2].reasons == ("driver",)
    assert rig.outcomes[3].reasons == ("refused",)


def test_a_request_of_two_loads_is_reported_once_with_all_bad_blocks_when_both_have_settled():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3), load(2, "a", 4))))
    rig.worker.start_loads()
    rig.engine.fail(1)
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({}, set(), set())
    rig.engine.settle(2)
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {3})


def test_a_request_of_two_refused_loads_is_reported_once():
    rig = Rig()
    rig.engine.poisoned = True
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3), load(2, "a", 4))))
    rig.worker.start_loads()
    rig.tell()
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {3, 4})


def test_a_request_that_loads_again_is_reported_again():
    rig = Rig(hold=False)
    for transfer_id in (1, 2):
        rig.worker.begin(StepPlan(loads=(load(transfer_id, "a", 3),)))
        rig.worker.start_loads()
        rig.tell()
    assert rig.finished == {"a": 2}


def test_a_refused_submit_settles_its_order_and_spares_the_others():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3),), stores=(store(2, 5),)))
    rig.worker.start_loads()
    rig.engine.poisoned = True
    rig.worker.submit_stores()
    rig.tell()
    assert rig.outcomes == {2: TransferOutcome(num_failed=1, reasons=("driver",))}
    rig.engine.settle(1)
    rig.tell()
    assert rig.finished == {"a": 1}


def test_orders_of_no_blocks_are_done_without_the_engine():
    rig = Rig()
    rig.worker.begin(StepPlan(loads=(load(1, "a"),), stores=(store(2),)))
    rig.worker.submit_stores()
    rig.tell()
    assert rig.engine.log == []
    assert rig.outcomes == {1: TransferOutcome(num_done=1), 2: TransferOutcome(num_done=1)}
    assert (rig.finished, rig.failed) == ({"a": 1}, set())


def test_a_completion_of_a_transfer_that_is_not_ours_is_ignored():
    rig = in_flight()
    rig.engine.submit(Direction.STORE, ids(50), ids(50), 99)
    rig.engine.settle(99)
    rig.tell()
    assert (rig.outcomes, rig.finished) == ({}, {})


# An engine that fails for good.


def gone(why: str) -> str:
    until = "what leaves VRAM is computed again until the server is restarted"
    return f"the copy engine failed: {why}; {until}"


def test_five_stores_to_a_poisoned_engine_are_one_tier_down():
    rig = Rig()
    rig.engine.poisoned = True
    for transfer_id in range(5):
        rig.worker.begin(StepPlan(stores=(store(transfer_id, transfer_id),)))
        rig.worker.submit_stores()
        rig.tell()
    assert rig.tier_down == [gone("the driver failed")]
    reasons = [rig.outcomes[transfer_id].reasons for transfer_id in range(5)]
    assert reasons == [("driver",), *[("no_tier",)] * 4]


def test_an_engine_that_is_poisoned_while_nothing_completes_is_seen_within_a_second():
    rig = in_flight()
    rig.tell()
    asked, health = [], rig.engine.health
    rig.engine.health = lambda: asked.append(rig.clock()) or health()  # type: ignore[method-assign]
    rig.engine.poisoned = True
    for _ in range(10):
        rig.tell()
    assert (rig.tier_down, asked) == ([], []), "asked at most once a second"
    rig.clock.advance(condition.LOOK_EVERY_S)
    rig.tell()
    assert rig.tier_down == [gone("CUDA error 700")]
    assert asked == [condition.LOOK_EVERY_S]


def test_an_idle_engine_is_not_asked():
    rig = Rig()
    rig.engine.poisoned = True
    for _ in range(3):
        rig.clock.advance(condition.LOOK_EVERY_S)
        rig.tell()
    assert rig.tier_down == []


def test_an_engine_that_dies_of_a_copy_takes_no_more_and_settles_what_it_has():
    rig = in_flight()
    rig.engine.fail(1, 700)
    rig.engine.poisoned = True
    rig.tell()
    assert rig.tier_down == [gone("CUDA error 700")]
    assert (rig.finished, rig.bad) == ({"a": 1}, {3, 4})
    rig.worker.begin(StepPlan(loads=(load(4, "d", 9),)))
    rig.worker.start_loads()
    rig.tell()
    assert rig.outcomes[4].reasons == ("no_tier",)
    assert 2 not in rig.outcomes  # it may still write to the block that b would be computed in
    assert not rig.engine.closed
    rig.engine.settle(2)
    rig.engine.fail(3, 700)
    rig.tell()
    assert (rig.finished, rig.failed) == ({"a": 1, "b": 1, "d": 1}, {"a", "d"})
    assert len(rig.tier_down) == 1
    rig.worker.shutdown()
    assert rig.engine.closed


def test_each_cause_is_told_once(monkeypatch):
    rig, told = Rig(), []
    monkeypatch.setattr(condition.logger, "warning", lambda text, *parts: told.append(text % parts))
    rig.worker.begin(StepPlan(loads=tuple(load(n, "a", n) for n in range(7))))
    rig.worker.start_loads()
    for n, error in enumerate((2, 2, 719, -9, CONFLICT, CORRUPT)):
        rig.engine.fail(n, error)
        rig.tell()
    rig.engine.given_up = ("batch",)
    rig.engine.settle(6)
    rig.tell()
    assert told == [
        "A copy failed: CUDA error 2. This is said once",
        "A copy failed: CUDA error 719. This is said once",
        "A copy failed: a bug in the native library (error -9); please report it with this log. "
        "This is said once",
        "A copy failed: an unfinished transfer uses a block or slot of it. This is said once",
        "The driver fails at the batch path, so copies go another way from here. This is said once",
    ]
    assert rig.tier_down == []


def test_a_refusal_of_an_engine_that_lives_is_no_driver_error():
    rig = Rig()

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise TransferError("slot -1 is not in 0..63.")

    rig.engine.submit = refuse  # type: ignore[method-assign]
    rig.worker.begin(StepPlan(loads=(load(1, "a", 1),)))
    rig.worker.start_loads()
    rig.tell()
    assert rig.outcomes[1].reasons == ("refused",)
    assert (rig.failed, rig.tier_down) == ({"a"}, [])


# No tier.


def expect_no_tier(rig: Rig) -> None:
    rig.worker.begin(StepPlan(loads=(load(1, "a", 3),), stores=(store(2, 5),), cancels=(9,)))
    rig.worker.start_loads()
    rig.worker.submit_stores()
    rig.tell()
    rig.tell()
    failed = TransferOutcome(num_failed=1, reasons=("no_tier",))
    assert rig.outcomes == {1: failed, 2: failed}
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {3})
    rig.worker.shutdown()


def test_an_engine_that_cannot_be_made_disables_the_tier_and_says_why_once():
    def fail(_layout: Layout, _num_slots: int) -> FakeCopyEngine:
        raise TransferError("no memory may be page-locked here")

    rig = Rig()
    rig.worker = ContinuumWorker(fail, CONFIG)
    rig.worker.register(LAYOUT)
    expect_no_tier(rig)
    assert rig.tier_down == ["no memory may be page-locked here"]


def test_a_layout_that_is_refused_disables_the_tier():
    rig = Rig()
    rig.worker = ContinuumWorker(rig._make, CONFIG)
    rig.worker.disable("layers of kind MambaSpec hold a state")
    expect_no_tier(rig)
    assert rig.tier_down == ["layers of kind MambaSpec hold a state"]


def test_dram_for_less_than_a_block_disables_the_tier_with_the_number_to_set():
    rig = Rig()
    made = len(rig.made)
    rig.worker = ContinuumWorker(rig._make, ContinuumConfig(dram_bytes=1999), num_ranks=2)
    rig.worker.register(LAYOUT)
    expect_no_tier(rig)
    assert "dram_bytes = 1999" in rig.tier_down[0]
    assert "set 2000 or more" in rig.tier_down[0]
    assert len(rig.made) == made


def test_a_tier_that_is_off_is_no_failure():
    rig = Rig(config=ContinuumConfig(dram_bytes=0))
    expect_no_tier(rig)
    assert (rig.made, rig.tier_down) == ([], [])


def test_the_engine_gets_this_ranks_share_of_the_dram():
    assert Rig().ready_slots == [{0: 64}]
    assert Rig().made == [(LAYOUT, 64)]
    assert num_slots_for(64_000, 4, 1000) == 16
    assert num_slots_for(3_999, 4, 1000) == 0


# Cancels.


def test_an_order_that_is_cancelled_in_its_own_plan_never_leaves_and_fails_as_cancelled():
    """An engine that did not step for 30 s (`/pause?mode=keep`) plans both at once."""
    rig = Rig()
    plan = StepPlan(
        loads=(load(1, "a", 3), load(2, "b", 4)), stores=(store(3, 5), store(4, 6)), cancels=(1, 4)
    )
    rig.worker.begin(plan)
    rig.worker.submit_stores()
    rig.tell()
    assert rig.submitted() == [2, 3]
    cancelled = TransferOutcome(num_failed=1, reasons=("cancelled",))
    assert rig.outcomes == {1: cancelled, 4: cancelled}
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {3})
    assert rig.engine.cancelled == [], "nothing of it was in flight"


# Preemption and shutdown.


def in_flight() -> Rig:
    rig = Rig()
    loads = (load(1, "a", 3, 4), load(2, "b", 5))
    rig.worker.begin(StepPlan(loads=loads, stores=(store(3, 6),)))
    rig.worker.submit_stores()
    return rig


def test_shutdown_settles_everything_once_and_later_orders_too():
    rig = in_flight()
    rig.engine.settle(2)
    rig.worker.begin(StepPlan(stores=(store(4, 7),)))
    rig.worker.shutdown()
    rig.tell()
    assert rig.outcomes.keys() == {1, 2, 3, 4}
    rig.worker.shutdown()
    rig.worker.begin(StepPlan(stores=(store(5, 8),)))
    rig.worker.submit_stores()
    rig.tell()
    assert rig.engine.closed
    assert rig.finished == {"a": 1, "b": 1}
    assert (rig.failed, rig.bad) == ({"a"}, {3, 4})
    reasons = {transfer_id: outcome.reasons for transfer_id, outcome in rig.outcomes.items()}
    closed = ("closed",)
    assert reasons == {1: closed, 2: (), 3: closed, 4: closed, 5: closed}


def test_shutdown_cancels_what_is_in_flight_instead_of_waiting_for_all_of_it():
    rig = in_flight()
    rig.engine.settle(2)
    rig.tell()
    assert rig.engine.cancelled == []
    rig.worker.shutdown()
    assert rig.engine.cancelled == [1, 3]
    rig.worker.shutdown()
    assert rig.engine.cancelled == [1, 3]


def test_shutdown_fails_what_the_engine_did_not_give_back():
    rig = in_flight()

    def close(_timeout_s: float) -> None:
        raise TransferError("copies still run after 2 s")

    rig.engine.close = close  # type: ignore[method-assign]
    rig.worker.shutdown()
    rig.tell()
    assert {outcome.reasons for outcome in rig.outcomes.values()} == {("closed",)}
    assert rig.finished == {"a": 1, "b": 1}


# Every order of hooks.

HOOKS = ("start_loads", "submit_stores", "poll", "take_report", "settle", "fail", "cancel", "again")
PLANS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans())
STEPS = st.lists(st.tuples(PLANS, st.lists(st.sampled_from(HOOKS), max_size=8)), max_size=8)


class Steps:
    """Runs plans and hooks in any order, and keeps what must come of them."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.next_id = 0
        self.loads: dict[int, LoadOrder] = {}
        self.stores: list[int] = []
        self.plan = StepPlan()

    def new_plan(self, num_loads: int, num_stores: int, cancel: bool) -> StepPlan:
        loads, stores = [], []
        cancels = tuple(self.loads)[-2:] if cancel else ()
        for _ in range(num_loads):
            order = load(self.next_id, f"r{self.next_id // 2}", self.next_id)
            self.loads[self.next_id] = order
            loads.append(order)
            self.next_id += 1
        for _ in range(num_stores):
            self.stores.append(self.next_id)
            stores.append(store(self.next_id, self.next_id))
            self.next_id += 1
        return StepPlan(tuple(loads), tuple(stores), cancels)

    def hook(self, name: str) -> None:
        rig, in_flight = self.rig, list(self.rig.engine.in_flight)
        if name == "again":
            rig.worker.begin(self.plan)
        elif name == "poll":
            rig.poll()
        elif name == "take_report":
            rig.take_report()
        elif name == "cancel":
            self.plan = StepPlan(cancels=tuple(in_flight[:1]))
            rig.worker.begin(self.plan)
        elif name in ("settle", "fail"):
            for tag in in_flight[:1]:
                rig.engine.settle(tag, Status.DONE if name == "settle" else Status.FAILED)
        else:
            getattr(rig.worker, name)()

    def check(self) -> None:
        """Everything was submitted and settled once; requests are told as their loads went."""
        rig = self.rig
        refused = [tag for tag, told in rig.outcomes.items() if told.reasons == ("no_tier",)]
        assert bool(refused) <= bool(rig.tier_down)
        assert sorted([*rig.submitted(), *refused]) == sorted([*self.loads, *self.stores])
        assert rig.outcomes.keys() == {*self.loads, *self.stores}
        wrong = {t for t in self.loads if rig.outcomes[t].num_failed}
        assert rig.bad == wrong
        assert rig.failed == {self.loads[t].request_id for t in wrong}
        assert set(rig.finished) == {order.request_id for order in self.loads.values()}
        # A request may come twice only if its second load came after the first was told.
        assert rig.finished.total() <= len(self.loads)


@settings(max_examples=150)
@given(
    steps=STEPS,
    gives_up=st.none() | st.integers(0, 8),
    last=st.sampled_from(["drain", "shutdown"]),
)
def test_exactly_once_in_every_order_of_hooks(steps, gives_up, last):
    run = Steps()
    for number, (plan, hooks) in enumerate(steps):
        run.plan = run.new_plan(*plan)
        run.rig.worker.begin(run.plan)
        left = run.rig.worker.due or StepPlan()
        assert left.stores == run.plan.stores, "leftovers leave before the next plan"
        if number == gives_up:
            run.rig.worker.disable("the pool is short")
        for name in hooks:
            run.hook(name)
    run.rig.worker.begin(StepPlan())
    if last == "shutdown":
        run.rig.worker.shutdown()
    run.rig.engine.settle_all()
    run.rig.tell()
    run.check()
    assert (run.rig.worker._in_flight, len(run.rig.worker._loads._waiting)) == ({}, 0)


# Cost.


def test_a_step_without_orders_costs_next_to_nothing():
    worker, plan = Rig().worker, StepPlan()

    def step() -> None:
        worker.begin(plan)
        worker.start_loads()
        worker.submit_stores()
        poll(worker)
        worker.take_report()

    seconds = min(timeit.repeat(step, number=2000, repeat=5)) / 2000
    assert seconds < 20e-6  # about 1 us; the rest is for a busy machine


def test_the_worker_needs_neither_torch_nor_vllm():
    code = (
        "import sys, continuum_connector.worker.worker\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
