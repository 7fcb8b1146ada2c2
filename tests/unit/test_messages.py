"""What crosses between scheduler and workers: sums over ranks, and survives pickling."""

from __future__ import annotations

import pickle

import numpy as np

from continuum_connector.messages import (
    LoadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_reports_of_ranks_add_up() -> None:
    first = WorkerReport({1: TransferOutcome(num_done=1, num_bytes=10, seconds=0.5)})
    second = WorkerReport(
        {1: TransferOutcome(num_failed=1, reasons=("driver",)), 2: TransferOutcome(num_done=1)},
        tier_down="no",
    )
    merged = first.merge(second)
    assert merged is first
    assert merged.outcomes[1] == TransferOutcome(1, 1, ("driver",), 10, 0.5)
    assert (merged.outcomes[1].num_ranks, merged.outcomes[2].num_ranks) == (2, 1)
    assert merged.tier_down == "no"
    assert second.outcomes[2] == TransferOutcome(num_done=1)


def test_of_failing_ranks_what_all_copied_and_what_any_found_bad_is_kept() -> None:
    total = TransferOutcome()
    total.add(TransferOutcome(num_done=1))
    total.add(_failed({0, 1, 2}, eio={3}))
    assert (total.copied, total.bad) == ({0, 1, 2}, {"eio": {3}})
    total.add(TransferOutcome(num_done=1))
    total.add(_failed({0, 2, 3}, eio={1}, corrupt={4}))
    assert (total.copied, total.bad) == ({0, 2}, {"eio": {1, 3}, "corrupt": {4}})
    total.add(TransferOutcome(num_failed=1, reasons=("closed",)))
    assert total.copied == set()
    assert pickle.loads(pickle.dumps(total)) == total


def _failed(copied: set[int], **bad: set[int]) -> TransferOutcome:
    places = {reason: frozenset(each) for reason, each in bad.items()}
    return TransferOutcome(num_failed=1, copied=frozenset(copied), bad=places)


def test_merging_does_not_tie_two_reports_together() -> None:
    first, second = WorkerReport(), WorkerReport({1: TransferOutcome(num_done=1)})
    first.merge(second).merge(WorkerReport({1: TransferOutcome(num_done=1)}))
    assert (first.outcomes[1].num_done, second.outcomes[1].num_done) == (2, 1)


def test_ready_slots_are_kept_per_rank_and_never_shrink() -> None:
    report = WorkerReport(ready_slots={0: 5, 1: 9})
    report.merge(WorkerReport(ready_slots={0: 3, 1: 10, 2: 1}))
    assert report.ready_slots == {0: 5, 1: 10, 2: 1}
    assert not WorkerReport(ready_slots={0: 0}).is_empty


def test_the_first_rank_without_a_tier_says_why() -> None:
    report = WorkerReport(tier_down="rank 0").merge(WorkerReport(tier_down="rank 1"))
    assert report.tier_down == "rank 0"
    assert not report.is_empty
    assert WorkerReport().is_empty
    assert not WorkerReport({1: TransferOutcome()}).is_empty


def test_a_plan_is_empty_without_orders() -> None:
    assert StepPlan().is_empty
    assert not StepPlan(cancels=(1,)).is_empty


def test_a_plan_crosses_processes_as_it_is() -> None:
    plan = StepPlan((LoadOrder(1, "r", ids(3, 4), ids(0, 1)),), (StoreOrder(2, ids(5), ids(2)),))
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.loads[0].request_id == "r"
    assert copy.loads[0].blocks.tolist() == [3, 4]
    assert copy.stores[0].slots.dtype == np.int32
