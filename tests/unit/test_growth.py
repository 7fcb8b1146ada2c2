"""A pool that grows while the server serves: what is reported, what is logged, how it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.memory import Taken
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.worker.abi import PoolState, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.tier import _SHORT_EVERY
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import FakeCopyEngine, poll
from tests.unit.test_worker import store

GIB = 2**30
SLOT = GIB // 4
LAYOUT = Layout((Region(4096, SLOT, 0, SLOT),), 100, SLOT, "cpu", 0)
NUM_SLOTS = 64  # 16 GiB
WHY = "the system lets this process page-lock 5 GiB; raise ulimit -l."


class Lines(logging.Handler):
    """Keeps what is logged, whoever configured the loggers above."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))

    def take(self) -> list[tuple[str, str]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("vllm.continuum_connector.worker"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def started(engine: FakeCopyEngine, rank: int = 0, **config: object) -> ContinuumWorker:
    keys = ContinuumConfig(dram_bytes=NUM_SLOTS * SLOT, **config)  # type: ignore[arg-type]
    engine.slot_bytes = LAYOUT.slot_bytes
    worker = ContinuumWorker(lambda _layout, _n: engine, keys, rank=rank)
    worker.register(LAYOUT)
    return worker


def step(worker: ContinuumWorker, engine: FakeCopyEngine, num_ready: int) -> WorkerReport | None:
    """One step after the pool has come to `num_ready` slots."""
    engine.num_ready = num_ready
    poll(worker)
    return worker.take_report()


def reported(worker: ContinuumWorker) -> dict[int, int]:
    report = worker.take_report()
    assert report is not None
    return report.ready_slots


def test_what_is_there_is_reported_at_start_and_whenever_there_is_more(lines: Lines) -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True)
    worker = started(engine, rank=3)
    assert reported(worker) == {3: 4}
    assert step(worker, engine, 4) is None
    report = step(worker, engine, 8)
    assert report is not None
    assert report.ready_slots == {3: 8}
    engine.is_growing = False
    report = step(worker, engine, 64)
    assert report is not None
    assert (report.ready_slots, report.tier_down) == ({3: 64}, "")
    engine.num_ready = 100  # nobody looks any more
    assert step(worker, engine, 100) is None


def test_the_log_tells_the_start_each_quarter_and_the_end(lines: Lines) -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True)
    worker = started(engine)
    assert lines.take() == [
        ("INFO", "serving with 1.0 of 16.0 GiB of DRAM, the rest follows"),
    ]
    for num_ready in range(4, 64):
        step(worker, engine, num_ready)
    assert [text for _, text in lines.take()] == [
        f"{gib}.0 of 16.0 GiB of DRAM are ready" for gib in (4, 8, 12)
    ]
    engine.is_growing = False
    step(worker, engine, 64)
    step(worker, engine, 64)
    end = "16.0 of 16.0 GiB of DRAM are ready on NUMA node 0: 2.0 s to populate, 1.0 s to page-lock"
    assert lines.take() == [("INFO", end)]


def test_a_pool_that_is_whole_at_start_is_told_in_one_line(lines: Lines) -> None:
    worker = started(FakeCopyEngine(num_ready=64))
    assert reported(worker) == {0: 64}
    [(level, text)] = lines.take()
    assert level == "INFO"
    assert text.startswith("16.0 of 16.0 GiB of DRAM are ready")


def test_what_the_pool_is_rounded_up_by_is_no_slot() -> None:
    assert reported(started(FakeCopyEngine(num_ready=NUM_SLOTS + 1))) == {0: NUM_SLOTS}


def test_a_pool_that_ends_early_is_smaller_with_one_warning(lines: Lines) -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True)
    worker = started(engine)
    lines.take()
    worker.take_report()
    engine.is_growing, engine.why = False, WHY
    report = step(worker, engine, 20)
    assert report is not None
    assert (report.ready_slots, report.tier_down) == ({0: 20}, "")
    assert lines.take() == [
        (
            "WARNING",
            "The DRAM tier is smaller for now: only 5.0 of 16.0 GiB of DRAM could be had: "
            "the system lets this process page-lock 5 GiB; raise ulimit -l",
        )
    ]
    assert step(worker, engine, 20) is None
    assert not engine.closed


def test_what_is_had_after_a_shortage_is_reported_and_seldom_looked_for(lines: Lines) -> None:
    engine = FakeCopyEngine(num_ready=20, why=WHY)
    looks = CountedLooks(engine)
    worker = started(engine)
    assert reported(worker) == {0: 20}
    lines.take()
    reports = [step(worker, engine, 33) for _ in range(_SHORT_EVERY)]
    assert [report.ready_slots for report in reports if report is not None] == [{0: 33}]
    assert looks.num == 2
    engine.why = ""
    reports = [step(worker, engine, NUM_SLOTS) for _ in range(3 * _SHORT_EVERY)]
    assert [report.ready_slots for report in reports if report is not None] == [{0: NUM_SLOTS}]
    assert looks.num == 3, "nobody looks any more"
    assert [(level, text[:22]) for level, text in lines.take()] == [
        ("INFO", "8.2 of 16.0 GiB of DRA"),
        ("INFO", "16.0 of 16.0 GiB of DR"),
    ]


class CountedLooks:
    """Counts how often an engine is asked for its pool."""

    def __init__(self, engine: FakeCopyEngine) -> None:
        self.num = 0
        self._look = engine.pool_state
        engine.pool_state = self.look  # type: ignore[method-assign]

    def look(self) -> PoolState:
        self.num += 1
        return self._look()


def test_a_pool_without_one_whole_block_is_no_tier() -> None:
    engine = FakeCopyEngine(num_ready=0, why=WHY)
    report = started(engine).take_report()
    assert report is not None
    assert "only 0.0 of 16.0 GiB" in report.tier_down
    assert "Not one block fits" in report.tier_down
    assert engine.closed


def test_a_pool_that_cannot_be_asked_is_no_tier() -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True)
    worker = started(engine)
    worker.take_report()

    def refuse() -> PoolState:
        raise TransferError("this process is a fork")

    engine.pool_state = refuse  # type: ignore[method-assign]
    report = step(worker, engine, 4)
    assert report is not None
    assert report.tier_down == "this process is a fork"


def test_a_shutdown_meanwhile_ends_the_looking() -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True)
    worker = started(engine)
    worker.shutdown()  # the fake fails whoever asks it after close
    poll(worker)
    assert reported(worker) == {0: 4}


def by_use(engine: FakeCopyEngine, **config: object) -> ContinuumWorker:
    """A worker whose pool nobody asked for: it takes 4 slots at first, then what is wanted."""
    engine.slot_bytes, engine.wanted_bytes = SLOT, 4 * SLOT
    taken = Taken(NUM_SLOTS * SLOT, "half of what is spare")
    keys = ContinuumConfig(dram=taken, **config)  # type: ignore[arg-type]
    worker = ContinuumWorker(lambda _layout, _n: engine, keys)
    worker.register(LAYOUT)
    return worker


def test_a_pool_that_nobody_asked_for_grows_as_blocks_need_it(lines: Lines) -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True, hold=False)
    worker = by_use(engine)
    assert lines.take() == [
        ("INFO", "serving with 1.0 of 16.0 GiB of DRAM, the rest follows as blocks need it")
    ]
    assert reported(worker) == {0: 4}
    for number, slots in enumerate([(0, 1), (1, 2), (0, 2)]):
        worker.begin(StepPlan(stores=[store(number, *slots)]))
        worker.submit_stores()
        poll(worker)
        worker.take_report()
    # twice what is used, and the first GiB more; slots that are used anew want nothing
    assert engine.wanted == [(2 * 2 + 4) * SLOT, (2 * 3 + 4) * SLOT]
    engine.num_ready = 10
    report = step(worker, engine, 10)
    assert report is not None
    assert report.ready_slots == {0: 10}
    assert not report.tier_down
    assert lines.take() == [], "it is not short, it waits"


def test_one_that_is_short_looks_again_and_says_so_once(lines: Lines) -> None:
    engine = FakeCopyEngine(num_ready=4)
    worker = by_use(engine)
    lines.take()
    engine.why = "the machine has 9.0 GiB available and keeps 8.0 GiB of it"
    worker.begin(StepPlan(stores=[store(1, 0)]))
    worker.submit_stores()
    poll(worker)
    assert [level for level, _ in lines.take()] == ["WARNING"]
    for _ in range(_SHORT_EVERY):
        step(worker, engine, 6)
    assert lines.take() == []
    assert step(worker, engine, 6) is None


def test_a_pool_that_was_asked_for_wants_nothing_more() -> None:
    engine = FakeCopyEngine(num_ready=4, is_growing=True)
    worker = started(engine)
    worker.begin(StepPlan(stores=[store(1, 0)]))
    worker.submit_stores()
    assert engine.wanted == []
