"""The CUDA driver from Python, over a libcuda of our own: C++ tests see more, but not this side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.libcuda import compile_libcuda, python_over

ROUND_TRIP = """
import ctypes
from tests.native.conftest import Rig, ids
from continuum_connector.worker.abi import Direction, Status

PATHS = {"batch": 1, "loop": 2, "gather": 3}
fake = ctypes.CDLL("libcuda.so.1")
if HIDDEN:
    fake.fake_cuda_hide(HIDDEN)
rig = Rig("cuda", path=PATH)
fake.fake_cuda_add_vram(ctypes.c_void_p(rig.vram.ctypes.data), ctypes.c_uint64(rig.vram.nbytes))
original, blocks = rig.vram.copy(), range(16)
done = [rig.finish(Direction.STORE, ids(*blocks), ids(*reversed(blocks)), 1)]
rig.vram[:] = 0
done.append(rig.finish(Direction.LOAD, ids(*blocks), ids(*reversed(blocks)), 2))
assert [d.status for d in done] == [Status.DONE] * 2, done
assert (rig.vram == original).all()
stats = rig.engine.stats()
offered = [name for name, bit in PATHS.items() if stats.paths >> bit & 1]
taken = [[name for name, bit in PATHS.items() if stats.num_trunks[way][bit]] for way in (1, 0)]
rig.engine.close(5.0)
fake.fake_cuda_broken_rule.restype = ctypes.c_char_p
print(offered, *taken, fake.fake_cuda_broken_rule().decode())
"""

GIVE_UP = """
import ctypes
from tests.native import test_giving_up as giving_up

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in (
        "contexts", "streams", "events", "registrations", "modules", "is_current")]

def counts():
    found = Counts()
    fake.fake_cuda_get_counts(ctypes.byref(found))
    return [getattr(found, name) for name, _ in Counts._fields_]

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_broken_rule.restype = ctypes.c_char_p
fake.fake_cuda_fail(b"cuMemHostRegister_v2", 40, 1, 2)
rank = giving_up.Rank("cuda", lambda vram: fake.fake_cuda_add_vram(
    ctypes.c_void_p(vram.ctypes.data), ctypes.c_uint64(vram.nbytes)), fake.fake_cuda_hold)
assert rank.engine.pool.wait(300.0)
rank.give_up()
print(counts()[3], rank.is_mapped())
fake.fake_cuda_hold(0)
rank.settle()
print(counts(), rank.is_mapped(), (rank.vram[0] == 7).all(), rank.engine.is_left_behind)
rank.worker.shutdown()
print(fake.fake_cuda_broken_rule().decode())
"""

OPEN = """
from tests.native.conftest import Rig
from continuum_connector.errors import TransferError
try:
    Rig("cuda")
except TransferError as error:
    print(error)
"""

BEHIND_STREAM_0 = """
import ctypes
from tests.native.conftest import Rig, ids
from continuum_connector.worker.abi import Direction

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_num_calls.restype = ctypes.c_uint64
rig = Rig("cuda")
fake.fake_cuda_add_vram(ctypes.c_void_p(rig.vram.ctypes.data), ctypes.c_uint64(rig.vram.nbytes))
for tag, direction in enumerate(Direction):
    before = fake.fake_cuda_num_calls(b"cuEventRecord")
    rig.finish(direction, ids(0), ids(0), tag)
    print(fake.fake_cuda_num_calls(b"cuEventRecord") - before)
rig.engine.close(5.0)
"""


@pytest.mark.parametrize(
    ("path", "stored_by", "loaded_by"),
    [
        ("auto", "batch", "gather"),
        ("batch", "batch", "batch"),
        ("loop", "loop", "loop"),
        ("gather", "gather", "gather"),
    ],
)
def test_loaded_bytes_equal_stored_bytes_by_the_path_that_stats_name(
    fake_cuda: Path, path: str, stored_by: str, loaded_by: str
) -> None:
    out = python_over(f"PATH, HIDDEN = {path!r}, None" + ROUND_TRIP, fake_cuda)
    assert out == f"['batch', 'loop', 'gather'] ['{stored_by}'] ['{loaded_by}']"


@pytest.mark.parametrize(
    ("hidden", "offered", "stored_by", "loaded_by"),
    [
        ("cuLaunchKernel", ["batch", "loop"], "batch", "batch"),
        ("cuMemcpyBatchAsync", ["loop", "gather"], "loop", "gather"),
    ],
)
def test_a_path_that_the_driver_lacks_is_not_offered(
    fake_cuda: Path, hidden: str, offered: list[str], stored_by: str, loaded_by: str
) -> None:
    out = python_over(f"PATH, HIDDEN = 'auto', {hidden.encode()!r}" + ROUND_TRIP, fake_cuda)
    assert out == f"{offered} ['{stored_by}'] ['{loaded_by}']"


def test_stream_0_is_the_default_stream_and_copies_wait_for_it(fake_cuda: Path) -> None:
    """torch's default stream has handle 0, which for the library is "wait for nothing"."""
    per_transfer = "2"  # events: behind the stream's work, and behind the one trunk
    assert python_over(BEHIND_STREAM_0, fake_cuda).split() == [per_transfer] * 2


def test_a_pool_that_is_given_up_while_it_serves_is_unlocked_by_another_thread(
    fake_cuda: Path,
) -> None:
    held, gone, *broken = python_over(GIVE_UP, fake_cuda).splitlines()
    assert held == "40 True"  # those before the one that the driver refused
    assert gone == "[0, 0, 0, 0, 0, 0] False True False"
    assert broken == []


def test_a_driver_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library" * 100)
    out = python_over(OPEN, tmp_path)
    assert out.startswith("the CUDA driver cannot be opened: ")
    assert "libcuda.so.1" in out


def test_an_entry_point_that_is_missing_is_named(tmp_path: Path) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" int cuInit(unsigned) { return 0; }')
    compile_libcuda(source, tmp_path)
    assert python_over(OPEN, tmp_path) == "the CUDA driver has no cuDeviceGet."
