"""A pool that grows by chunks, over a libcuda of our own."""

from __future__ import annotations

from pathlib import Path

from tests.native.libcuda import python_over

GROW = """
import ctypes
from tests.native.conftest import Rig

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_fail(b"cuMemHostRegister_v2", 2, 1, 2)  # after the kernel's tables and one chunk
rig = Rig("cuda", chunk_bytes=8192, first_bytes=8192)
assert rig.engine.pool.wait(300.0)
state = rig.engine.pool_state()
print(state.ready_bytes, state.mapped_bytes, state.why)
rig.engine.close(5.0)
"""


def test_the_chunks_are_as_large_as_they_are_asked_for(fake_cuda: Path) -> None:
    ready, mapped, why = python_over(GROW, fake_cuda).split(maxsplit=2)
    assert (int(ready), int(mapped)) == (8192, 24 * 8192)
    assert why.startswith("page-locking stopped at 8.0 KiB of 192.0 KiB: ")
