"""The GIL at the C boundary: what a step calls keeps it, what blocks gives it up.

A call that drops the GIL waits up to a switch interval (5 ms) to have it back, if another Python
thread is busy; several times in a step that is more than the step's own work.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.worker import abi
from continuum_connector.worker.abi import Direction, Status
from tests.native import sim
from tests.native.conftest import LIMIT_S, Rig, ids

STORE = Direction.STORE
HEADER = Path(__file__).parents[2] / "csrc/ckv.h"
STEP_CALLS = {
    "ckv_submit": "orders leave in every step",
    "ckv_poll": "and come back in every step",
    "ckv_cancel": "a program returned or left",
    "ckv_get_stats": "engine.health(), after every poll that brought something",
    "ckv_pool_get_state": "in every step while the pool grows",
    "ckv_pool_want": "a store fills slots of a pool that grows by use",
    "ckv_last_error": "why one of these was refused",
}

DISK_CALLS = {
    "ckv_disk_submit": "what leaves DRAM is written, what a turn waits for is read",
    "ckv_disk_get_state": "in every step while a disk has something to do",
    "ckv_disk_scan": "in every step while a restart finds again what there is",
    "ckv_disk_reset": "the prefix cache was reset",
}


class Library:
    """The native library, and which of its functions were asked for."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._library, name)


def a_step(rig: Rig, tag: int) -> None:
    """All that the worker asks of its engine between two waits."""
    sim.hold(rig.engine)
    rig.engine.submit(STORE, ids(1), ids(1), tag)
    with pytest.raises(TransferError, match="tag"):
        rig.engine.submit(STORE, ids(2), ids(2), tag)
    rig.engine.cancel(tag)
    sim.release(rig.engine)
    assert rig.engine.wait(tag, LIMIT_S)
    rig.engine.pool_state()
    rig.engine.pool.want(1)
    assert rig.engine.poll()[0].status in (Status.DONE, Status.CANCELLED)
    assert rig.engine.health().poison == 0


def test_what_a_step_calls_is_in_the_set_that_keeps_the_gil(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking, quick = abi.load_library()
    assert isinstance(quick, ctypes.PyDLL)
    assert not isinstance(blocking, ctypes.PyDLL)
    keeps, gives = Library(quick), Library(blocking)
    for user in (rig.engine, rig.engine.pool):
        user._quick, user._blocking = keeps, gives
    monkeypatch.setattr(abi, "load_library", lambda: (blocking, keeps))  # for its last error
    a_step(rig, 1)
    assert keeps.names == set(STEP_CALLS) == set(abi._QUICK) - set(DISK_CALLS)
    assert gives.names == {"ckv_wait"}


@pytest.mark.parametrize("name", abi._QUICK)
def test_what_keeps_the_gil_does_not_block(name: str) -> None:
    """Says the header, in the comment above it."""
    text = HEADER.read_text()
    declared = re.search(rf"^\w.*\b{name}\(", text, re.MULTILINE)
    assert declared
    comment = text[text.rindex("/*", 0, declared.start()) : declared.start()]
    assert "does not block" in comment.lower()


@pytest.fixture
def _no_switch() -> Iterator[None]:
    """A Python thread keeps the GIL until it gives it up by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_no_switch")
def test_no_other_thread_runs_during_what_a_step_calls(rig: Rig) -> None:
    sim.hold(rig.engine)
    rig.engine.submit(STORE, ids(1), ids(1), 1)
    begin, ran = threading.Lock(), threading.Event()
    begin.acquire()

    def release() -> None:
        with begin:
            ran.set()
            sim.release(rig.engine)

    thread = threading.Thread(target=release)
    thread.start()
    begin.release()  # from here on it wants the GIL
    for tag in range(2, 2000):
        with pytest.raises(TransferError):
            rig.engine.submit(STORE, ids(2), ids(2), 1)  # a tag that is in use
        rig.engine.cancel(tag)
        rig.engine.health()
        rig.engine.pool_state()
        rig.engine._drain()
    assert not ran.is_set()
    assert rig.engine.wait(1, LIMIT_S)  # and while this blocks it runs, or nothing would be copied
    assert ran.is_set()
    thread.join()
