"""The ctypes side: what the worker sees of the native engine."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.tools.checks import ask
from continuum_connector.worker import abi
from continuum_connector.worker.abi import CONFLICT, Direction, Health, Region, Status
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine
from continuum_connector.worker.worker import ContinuumWorker
from tests.native import sim
from tests.native.conftest import LIMIT_S, Rig, ids

LOAD, STORE = Direction.LOAD, Direction.STORE


def test_loaded_bytes_equal_stored_bytes(rig: Rig) -> None:
    original = rig.vram.copy()
    blocks, slots = ids(0, 3, 4, 15), ids(23, 1, 2, 0)
    stored = rig.finish(STORE, blocks, slots, 1)
    assert (stored.tag, stored.status, stored.error) == (1, Status.DONE, 0)
    assert stored.num_bytes == 4 * 2 * Rig.PIECE
    assert stored.seconds > 0.0
    for block, slot in zip(blocks, slots, strict=True):
        assert np.array_equal(rig.slot(slot), original[:, block])
    rig.vram[:] = 0
    assert rig.finish(LOAD, blocks, slots, 2).status is Status.DONE
    assert np.array_equal(rig.vram[:, blocks], original[:, blocks])
    assert rig.vram.sum() == original[:, blocks].sum()


def test_a_poisoned_slot_is_seen_by_the_load(rig: Rig) -> None:
    rig.finish(STORE, ids(0), ids(0), 1)
    rig.slot(0)[1, 17] ^= 0xFF
    before = rig.vram.copy()
    rig.finish(LOAD, ids(0), ids(0), 2)
    assert list(zip(*np.nonzero(rig.vram != before), strict=True)) == [(1, 0, 17)]


def test_a_slot_that_changed_fails_its_load_if_it_is_summed() -> None:
    for checksum_every, status, error in ((1, Status.FAILED, -10), (2, Status.DONE, 0)):
        rig = Rig(checksum_every=checksum_every)
        rig.finish(STORE, ids(0), ids(0), 1)
        rig.slot(0)[1, 17] ^= 0xFF
        loaded = rig.finish(LOAD, ids(0), ids(0), 2)
        assert (loaded.status, loaded.error, loaded.num_bytes) == (status, error, 2 * Rig.PIECE)
        stats = rig.engine.stats()
        summed = 1 if checksum_every == 1 else 0
        assert (stats.num_summed, stats.num_checked, stats.num_corrupt) == (summed,) * 3
        rig.engine.close(5.0)


def test_ids_are_copied_before_submit_returns(rig: Rig) -> None:
    sim.hold(rig.engine)
    blocks, slots = ids(1, 2), ids(1, 2)
    rig.engine.submit(STORE, blocks, slots, 1)
    blocks[:] = slots[:] = 9
    sim.release(rig.engine)
    assert rig.engine.wait(1, LIMIT_S)
    assert np.array_equal(rig.slot(2), rig.vram[:, 2])


def test_ids_may_be_read_only_and_lie_apart(rig: Rig) -> None:
    apart = np.array([[3, 9], [4, 9], [5, 9]], dtype=np.int32)[:, 0]
    fixed = np.frombuffer(ids(7, 1, 2).tobytes(), dtype=np.int32)
    assert rig.finish(STORE, apart, fixed, 1).status is Status.DONE
    for block, slot in ((3, 7), (4, 1), (5, 2)):
        assert np.array_equal(rig.slot(slot), rig.vram[:, block])
    with pytest.raises(TransferError, match="int32"):
        rig.engine.submit(STORE, apart.astype(np.int64), fixed.astype(np.int64), 2)


def test_the_engine_says_which_ways_of_copying_it_was_offered(rig: Rig) -> None:
    assert rig.engine.paths == ("batch", "loop", "gather")


def test_a_simulated_pool_is_ready_at_once(rig: Rig) -> None:
    state = rig.engine.pool_state()
    assert state.ready_bytes == state.mapped_bytes >= Rig.NUM_SLOTS * 2 * Rig.PIECE
    assert (state.is_growing, state.why, state.lock_s) == (False, "", 0.0)
    assert rig.engine.pool.wait(0.0)
    rig.engine.close(5.0)
    with pytest.raises(TransferError, match="closed"):
        rig.engine.pool_state()
    with pytest.raises(TransferError, match="closed"):
        rig.engine.pool.state()


def test_each_transfer_is_reported_once_and_in_order(rig: Rig) -> None:
    assert rig.engine.poll() == []
    for tag in range(600):  # more than one poll's buffer
        rig.engine.submit(STORE, ids(tag % 16), ids(tag % 16), tag)
        assert rig.engine.wait(tag, LIMIT_S)
    assert [c.tag for c in rig.engine.poll()] == list(range(600))
    assert rig.engine.poll() == []


def test_a_load_passes_speculative_ones_in_the_queue() -> None:
    rig = Rig(trunk_bytes=Rig.PIECE, window_bytes=Rig.PIECE)
    sim.hold(rig.engine)
    sim.submit_speculative(rig.engine, LOAD.value, ids(*range(8)), ids(*range(8)), 1)
    rig.engine.submit(LOAD, ids(9), ids(9), 2)
    sim.release(rig.engine)
    assert rig.engine.wait(1, LIMIT_S)
    assert rig.engine.wait(2, LIMIT_S)
    assert [c.tag for c in rig.engine.poll()] == [2, 1]
    with pytest.raises(TransferError, match="flags 1 do not fit"):
        sim.submit_speculative(rig.engine, STORE.value, ids(1), ids(1), 3)
    rig.engine.close(5.0)


def test_a_held_transfer_stays_in_flight_until_release(rig: Rig) -> None:
    sim.hold(rig.engine)
    rig.engine.submit(STORE, ids(1), ids(1), 1)
    assert not rig.engine.wait(1, 0.02)
    assert rig.engine.poll() == []
    assert not rig.slot(1).any()
    sim.release(rig.engine)
    assert rig.engine.wait(1, LIMIT_S)
    assert rig.engine.poll()[0].status is Status.DONE


def test_cancel_reports_after_the_trunk_in_flight() -> None:
    rig = Rig(trunk_bytes=8192, window_bytes=8192)
    sim.hold(rig.engine)
    rig.engine.submit(STORE, ids(*range(16)), ids(*range(16)), 1)
    while not sim.stats(rig.engine).num_copy_calls[STORE.value]:
        os.sched_yield()
    rig.engine.cancel(1)
    assert not rig.engine.wait(1, 0.02)
    sim.release(rig.engine)
    assert rig.engine.wait(1, LIMIT_S)
    (completion,) = rig.engine.poll()
    assert completion.status is Status.CANCELLED
    assert completion.num_bytes == 8192
    rig.engine.close(5.0)


def test_store_waits_for_its_stream(rig: Rig) -> None:
    stream = sim.stream(rig.engine)
    sim.block(rig.engine, stream)
    sim.compute(rig.engine, stream, 0.0)
    rig.engine.submit(STORE, ids(1), ids(1), 1, after_stream=stream)
    assert not rig.engine.wait(1, 0.02)
    assert sim.stats(rig.engine).num_copy_calls[STORE.value] == 0
    sim.block(rig.engine, stream, on=False)
    assert rig.engine.wait(1, LIMIT_S)


def test_a_driver_error_fails_one_transfer_and_a_sticky_one_all(rig: Rig) -> None:
    sim.fail_after(rig.engine, 0, code=2)
    failed = rig.finish(STORE, ids(1), ids(1), 1)
    assert (failed.status, failed.error) == (Status.FAILED, 2)
    assert rig.finish(STORE, ids(1), ids(1), 2).status is Status.DONE
    sim.fail_after(rig.engine, 0, code=700)
    assert rig.finish(STORE, ids(1), ids(1), 3).error == 700
    with pytest.raises(TransferError, match=r"copies no more since a driver error: .*700\.$"):
        rig.engine.submit(STORE, ids(1), ids(1), 4)


def test_health_names_what_ended_the_engine(rig: Rig) -> None:
    assert rig.engine.health() == Health()
    sim.fail_after(rig.engine, 0, code=2)
    rig.finish(STORE, ids(1), ids(1), 1)
    assert rig.engine.health() == Health()
    sim.fail_after(rig.engine, 0, code=700)
    rig.finish(STORE, ids(1), ids(1), 2)
    assert rig.engine.health().poison == 700


def test_health_names_the_path_that_was_given_up(rig: Rig) -> None:
    sim.fail_path(rig.engine, "batch")
    blocks = ids(*range(0, 16, 2))
    assert rig.finish(STORE, blocks, blocks, 1).status is Status.DONE
    assert rig.engine.health() == Health(given_up=("batch",))


@pytest.mark.parametrize(
    ("blocks", "slots", "text"),
    [
        (ids(16), ids(0), "block 16 is not in 0..15."),
        (ids(0), ids(-1), "slot -1 is not in 0..23."),
        (ids(0, 1), ids(0), "transfer 5: 2 blocks do not pair with 1 slots."),
        (ids(0).astype(np.int64), ids(0), "transfer 5: ids are int64, and must be int32."),
        (ids(0), ids(0).astype(np.float32), "transfer 5: ids are float32, and must be int32."),
    ],
)
def test_a_wrong_transfer_is_refused_in_one_sentence(
    rig: Rig, blocks: np.ndarray, slots: np.ndarray, text: str
) -> None:
    with pytest.raises(TransferError, match=re.escape(text)):
        rig.engine.submit(STORE, blocks, slots, 5)


def test_a_transfer_that_conflicts_with_an_unfinished_one_fails_as_that(rig: Rig) -> None:
    sim.hold(rig.engine)
    rig.engine.submit(LOAD, ids(7), ids(2), 1)
    later = rig.finish(STORE, ids(0), ids(2), 5)
    assert (later.status, later.error, later.num_bytes) == (Status.FAILED, CONFLICT, 0)
    sim.release(rig.engine)


def test_ids_that_were_pickled_are_taken(rig: Rig) -> None:
    sent: np.ndarray = pickle.loads(pickle.dumps(ids(3)))  # its dtype is another object
    assert rig.finish(STORE, sent, sent, 1).status is Status.DONE


def test_close_is_idempotent_and_its_reports_can_be_polled() -> None:
    rig = Rig(sim_mbps=20)
    rig.engine.submit(STORE, ids(*range(16)), ids(*range(16)), 1)
    rig.engine.close(5.0)
    rig.engine.close(5.0)
    assert [c.status for c in rig.engine.poll()] == [Status.DONE]
    assert rig.engine.poll() == []
    assert rig.engine.wait(1, 0.0)
    rig.engine.cancel(1)
    with pytest.raises(TransferError, match=r"^the copy engine is closed\.$"):
        rig.engine.submit(STORE, ids(1), ids(1), 2)
    with pytest.raises(TransferError, match="pool is closed"):
        rig.engine.pool.view()


def test_close_does_not_wait_for_a_driver_that_keeps_locking_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    handle, pool = rig.engine._handle, rig.engine.pool
    with monkeypatch.context() as stuck:
        stuck.setattr(pool, "wait", lambda timeout_s: False)
        rig.engine.submit(STORE, ids(1), ids(1), 1)
        rig.engine.close(5.0)
    assert rig.engine.is_left_behind
    assert [(c.tag, c.status) for c in rig.engine.poll()] == [(1, Status.DONE)]
    assert pool.view()[0] == pool.view()[-1]  # both ends are mapped still
    assert not pool.state().is_growing  # neither the pool nor its engine was freed
    rig.engine.close(5.0)
    pool.close()
    rig.engine._blocking.ckv_free(handle)


def test_close_does_not_wait_for_a_driver_that_keeps_its_copies() -> None:
    # In a process of its own: what is left behind stays with it.
    code = """
from tests.native import sim
from tests.native.conftest import LIMIT_S, Rig, ids
from continuum_connector.worker.abi import Direction
rig = Rig()
sim.hold(rig.engine)
rig.engine.submit(Direction.STORE, ids(1), ids(1), 1)
while not sim.stats(rig.engine).num_copy_calls[1]: pass
rig.engine.close(0.01)
print(rig.engine.is_left_behind, [(c.tag, c.status.name, c.error) for c in rig.engine.poll()])
"""
    done = _python(code)
    assert done.stdout.strip() == "True [(1, 'FAILED', -4)]", done.stderr


def test_a_fork_is_refused_and_can_leave() -> None:
    code = """
import os
from tests.native.conftest import LIMIT_S, Rig, ids
from continuum_connector.errors import TransferError
from continuum_connector.worker.abi import Direction
rig = Rig()
pid = os.fork()
if pid == 0:
    try:
        rig.engine.submit(Direction.STORE, ids(1), ids(1), 1)
    except TransferError as error:
        ok = "a fork cannot use it" in str(error)
    rig.engine.close(1.0)
    os._exit(0 if ok else 1)
status = os.waitpid(pid, 0)[1]
print(status, rig.finish(Direction.STORE, ids(1), ids(1), 2).status.name)
rig.engine.close(1.0)
"""
    done = _python(code)
    assert done.stdout.strip() == "0 DONE", done.stderr


def test_opening_and_closing_leaks_no_thread_and_no_file() -> None:
    def count() -> tuple[int, ...]:
        return tuple(len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))

    Rig().engine.close(5.0)
    before = count()
    for _ in range(20):
        rig = Rig()
        rig.finish(STORE, ids(1), ids(1), 1)
        rig.engine.close(5.0)
    assert count() == before


def test_cuda_is_never_replaced_by_the_simulator() -> None:
    if _has_libcuda():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(TransferError, match=r"^the CUDA driver cannot be opened: .*libcuda.*\.$"):
        NativeEngine("cuda", Layout((Region(4096, 4096, 0, 4096),), 1, 4096, "cuda", 0), 1)


def test_a_wrong_setup_is_refused_in_one_sentence() -> None:
    region = Region(4096, 4096, 0, 4096)
    with pytest.raises(TransferError, match="more than its stride in VRAM"):
        NativeEngine("sim", Layout((region,), 1, 4095, "cpu", 0), 1)
    with pytest.raises(TransferError, match="at least one region"):
        NativeEngine("sim", Layout((), 1, 4096, "cpu", 0), 1)
    with pytest.raises(TransferError, match="no host pool: mapping"):
        NativeEngine("sim", Layout((region,), 1, 1 << 40, "cpu", 0), 1 << 20)


def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(abi.continuum_connector, "__path__", [str(tmp_path)])
    monkeypatch.setattr(abi.sys, "path", [str(tmp_path)])
    with pytest.raises(
        TransferError, match=r"not built; `pip install \.` builds it and needs g\+\+"
    ):
        abi.find_library()


def test_a_source_tree_finds_the_library_of_the_installed_wheel_that_it_hides(
    tmp_path: Path,
) -> None:
    """`python -m pytest tests/gpu` in a clone, after `pip install .`: the clone comes first."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    sources = Path(abi.__file__).parents[1]
    left_out = shutil.ignore_patterns("_ckv", "__pycache__")
    shutil.copytree(sources, tree / "continuum_connector", ignore=left_out)
    installed = site / "continuum_connector" / "_ckv" / "libckv.so"
    installed.parent.mkdir(parents=True)
    shutil.copy(abi.find_library(), installed)
    packages = Path(np.__file__).parents[1]
    found = _python(
        f"import sys; sys.path[:0] = {[str(tree), str(site), str(packages)]}\n"
        "from continuum_connector.worker import abi\n"
        "print(abi.__file__, abi.find_library(), abi.load_library()[0].ckv_abi_version())",
        "-S",  # no hook of an editable install
    )
    ours = tree / "continuum_connector" / "worker" / "abi.py"
    assert found.stdout.split() == [str(ours), str(installed), str(abi.ABI_VERSION)], found.stderr


def test_a_library_that_does_not_load_costs_the_tier_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another libc, another CPU, cut short: the linker's OSError must not leave the worker."""
    library = tmp_path / "libckv.so"
    library.write_bytes(b"\x7fELF and then nothing")
    monkeypatch.setenv("CKV_LIBRARY", str(library))
    monkeypatch.setattr(abi, "load_library", abi.load_library.__wrapped__)  # not what is cached
    worker = ContinuumWorker(
        lambda layout, n: NativeEngine("sim", layout, n),
        ContinuumConfig(dram_bytes=1 << 20),
    )
    worker.register(Layout((Region(4096, 4096, 0, 4096),), 16, 4096, "cpu", 0))
    report = worker.take_report()
    assert report is not None
    assert report.tier_down.startswith(f"the native library does not load ({library}: ")
    assert report.tier_down.endswith("); install the package again here.")
    assert ask.look_at_native()["trouble"] == report.tier_down


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_only_ckv_symbols_leave_the_library() -> None:
    out = subprocess.run(
        ["nm", "-D", "--defined-only", str(abi.find_library())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in out.splitlines()}
    declared = {*abi._BLOCKING, *abi._QUICK, *sim.SIGNATURES}
    assert names == declared


def test_structs_are_as_long_as_the_library_says() -> None:
    # Those with a size of their own are refused if it differs; a completion or region would shift.
    assert ctypes.sizeof(abi.Config) == 64
    assert ctypes.sizeof(abi.RawRegion) == 40
    assert ctypes.sizeof(abi.RawCompletion) == 64
    assert ctypes.sizeof(sim.SimStats) == 104
    assert ctypes.sizeof(abi.Stats) == 216
    assert ctypes.sizeof(abi.PoolConfig) == 56
    assert ctypes.sizeof(abi.RawPoolState) == 312
    assert ctypes.sizeof(abi.DiskConfig) == 52
    assert ctypes.sizeof(abi.DiskEntry) == 64
    assert ctypes.sizeof(abi.RawDiskState) == 320


def _python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "ignore", *options, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_continuum_check_says_why_the_library_opens_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ask.look_at_native() == {"abi": abi.ABI_VERSION}
    monkeypatch.setattr(ask, "SIMULATOR", 99)
    assert "99" in ask.look_at_native()["trouble"]
