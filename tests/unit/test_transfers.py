"""Every store and load settles once, and the books close at any time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.errors import InvariantError
from continuum_connector.messages import TransferOutcome, WorkerReport
from continuum_connector.scheduler.tiers.slots import Tickets
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Transfer,
    TransferLedger,
    TransferState,
)

OWNER = Owner(lambda _transfer: None, lambda _why: None)


class FakeHold:
    """Block ids of a hold; the ledger looks at nothing else."""

    def __init__(self, *ids: int) -> None:
        self.ids = np.array(ids, dtype=np.int32)


def slots(*numbers: int) -> Tickets:
    return np.array(numbers, dtype=np.int64)


def a_store(ledger: TransferLedger, now: float = 0.0) -> Transfer:
    hold: Any = FakeHold(4, 5)
    return ledger.admit(OWNER, Kind.STORE, "p", hold.ids, slots(0, 1), now, hold=hold)


def a_load(ledger: TransferLedger) -> Transfer:
    blocks = np.array([7, 8], np.int32)
    return ledger.admit(OWNER, Kind.LOAD, "p", blocks, slots(2, 3), 0.0, request_id="r")


def report(*ids: int, failed: tuple[str, ...] = (), ranks: int = 1) -> WorkerReport:
    outcome = TransferOutcome(ranks - len(failed), len(failed), failed)
    return WorkerReport(dict.fromkeys(ids, outcome))


def test_a_plan_carries_what_was_queued_once() -> None:
    ledger = TransferLedger(1)
    store, load = a_store(ledger), a_load(ledger)
    plan = ledger.drain()
    assert [order.transfer_id for order in (*plan.stores, *plan.loads)] == [store.id, load.id]
    assert plan.stores[0].blocks.dtype == plan.loads[0].slots.dtype == np.int32
    assert plan.stores[0].blocks.tolist() == [4, 5]
    assert plan.loads[0].slots.tolist() == [2, 3]
    assert plan.loads[0].request_id == "r"
    assert store.state is load.state is TransferState.SUBMITTED
    assert ledger.drain().is_empty


def test_a_transfer_is_done_when_every_rank_is() -> None:
    ledger = TransferLedger(3)
    store = a_store(ledger)
    ledger.drain()
    assert ledger.settle(report(store.id)) == []
    assert ledger.settle(report(store.id)) == []
    assert list(ledger) == [store]
    assert ledger.settle(report(store.id)) == [store]
    assert (store.state, len(ledger)) == (TransferState.DONE, 0)


def test_one_rank_that_fails_fails_the_transfer_when_the_last_has_reported() -> None:
    ledger = TransferLedger(2)
    load = a_load(ledger)
    ledger.drain()
    assert ledger.settle(report(load.id, failed=("driver",))) == []
    assert load.state is TransferState.SUBMITTED
    assert ledger.settle(report(load.id)) == [load]
    assert load.state is TransferState.FAILED
    assert load.outcome is not None
    assert load.outcome.reasons == ("driver",)


def test_a_rank_that_reports_twice_is_a_bug() -> None:
    ledger = TransferLedger(1)
    store = a_store(ledger)
    ledger.drain()
    with pytest.raises(InvariantError, match="2 of 1 ranks"):
        ledger.settle(report(store.id, ranks=2))
    other = a_store(ledger)
    ledger.drain()
    ledger.settle(report(other.id))
    with pytest.raises(InvariantError, match="settled, but not in flight"):
        ledger.settle(report(other.id))


def test_a_cancelled_transfer_still_settles_and_is_asked_for_once() -> None:
    ledger = TransferLedger(1)
    load = a_load(ledger)
    ledger.drain()
    ledger.cancel(load)
    ledger.cancel(load)
    assert ledger.drain().cancels == (load.id,)
    assert ledger.drain().is_empty
    ledger.settle(report(load.id))
    assert load.state is TransferState.DONE  # it was faster


def test_an_abandoned_store_is_cancelled_and_settles_as_abandoned() -> None:
    ledger = TransferLedger(1)
    store = a_store(ledger)
    ledger.drain()
    assert not ledger.abandon(store)
    assert ledger.drain().cancels == (store.id,)
    assert ledger.settle(report(store.id, failed=("cancelled",))) == [store]
    assert store.state is TransferState.ABANDONED


def test_an_abandoned_store_that_has_not_left_never_does() -> None:
    ledger = TransferLedger(1)
    store, other = a_store(ledger), a_store(ledger)
    assert ledger.abandon(store)
    assert (store.state, len(ledger)) == (TransferState.ABANDONED, 1)
    plan = ledger.drain()
    assert ([order.transfer_id for order in plan.stores], plan.cancels) == ([other.id], ())


def test_a_transfer_of_nothing_or_of_unequal_ends_is_a_bug() -> None:
    ledger = TransferLedger(1)
    with pytest.raises(InvariantError, match="0 blocks"):
        ledger.admit(OWNER, Kind.LOAD, "p", [], [], 0.0)
    with pytest.raises(InvariantError, match="1 blocks and 2 slots"):
        ledger.admit(OWNER, Kind.LOAD, "p", [1], slots(1, 2), 0.0)
    assert len(ledger) == 0


@given(st.integers(1, 3), st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=40)
def test_admitted_is_settled_plus_in_flight_whatever_happens(
    world_size: int, do: list[int]
) -> None:
    ledger = TransferLedger(world_size)
    owed: dict[int, int] = {}
    for step, action in enumerate(do):
        if action < 2:
            transfer = a_store(ledger) if action else a_load(ledger)
            owed[transfer.id] = world_size
        elif action == 2:
            ledger.drain()
        elif ledger and action == 3:
            transfer = min(ledger, key=lambda t: t.id)
            if transfer.hold is not None and transfer.state is not TransferState.ABANDONED:
                if ledger.abandon(transfer):
                    del owed[transfer.id]
            else:
                ledger.cancel(transfer)
        elif owed:
            each = sorted(owed)[step % len(owed)]
            if each in {t.id for t in ledger if t.state is TransferState.QUEUED}:
                continue  # no worker has it yet
            failed = ("driver",) if action == 5 else ()
            owed[each] -= 1
            settled = ledger.settle(report(each, failed=failed))
            assert [t.id for t in settled] == ([] if owed[each] else [each])
            owed = {i: n for i, n in owed.items() if n}
        assert {t.id for t in ledger} == set(owed)
