"""The engine over a real driver: bytes, order, cancel, checksums, growth, graphs, a lost context.

python -m pytest tests/gpu -m gpu        # on a machine with a GPU
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from continuum_connector.worker.abi import Direction, Status
from tests.gpu.conftest import DEVICES, KIB, MIB, Cuda, GpuRig, StandIn, torch

LOAD, STORE = Direction.LOAD, Direction.STORE
PATHS = {"auto": 0, "batch": 1, "loop": 2, "gather": 3}
LAYOUTS = {"1 region of 2 MiB": (1, 2 * MIB), "64 regions of 32 KiB": (64, 32 * KIB)}
CORRUPT = -10
DELAY_S = 0.05  # of a kernel that copies must wait for

MakeRig = Callable[..., GpuRig]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_bytes_equal_stored_bytes(make_rig: MakeRig, layout: str, path: str) -> None:
    if path != "auto" and not make_rig().has_path(PATHS[path]):
        pytest.skip(f"this driver has no path {path}")
    rig = make_rig(*LAYOUTS[layout], path=path)
    original = rig.vram.cpu().numpy().copy()
    blocks, slots, others = [0, 3, 4, 5, 15], [9, 1, 2, 3, 0], [7, 2, 1, 12, 9]
    torch_done(rig)
    assert rig.finish(STORE, blocks, slots).status is Status.DONE
    for block, slot in zip(blocks, slots, strict=True):
        assert np.array_equal(rig.slots[slot], original[:, block])
    assert rig.finish(LOAD, others, slots).status is Status.DONE
    expected = original.copy()
    expected[:, others] = original[:, blocks]
    assert np.array_equal(rig.vram.cpu().numpy(), expected), "other blocks stay as they were"
    trunks = rig.engine.stats().num_trunks
    if path != "auto":
        assert trunks[LOAD.value][PATHS[path]] > 0
        assert trunks[STORE.value][PATHS[path]] > 0


def torch_done(rig: GpuRig) -> None:
    """What torch queued so far is over."""
    if rig.vram.is_cuda:
        torch.cuda.synchronize()


def test_a_store_takes_what_compute_leaves(make_rig: MakeRig, device: StandIn | Cuda) -> None:
    rig = make_rig(1, MIB)
    stream = device.slow_fill(rig, rig.vram[0, 3], 7, DELAY_S)
    assert rig.finish(STORE, [3], [5], after=stream).status is Status.DONE
    assert (rig.slots[5] == 7).all()


def test_a_store_takes_what_compute_leaves_on_the_default_stream(
    make_rig: MakeRig, device: StandIn | Cuda
) -> None:
    rig = make_rig(1, MIB)
    stream = device.slow_fill_on_default(rig.vram[0, 3], 7, DELAY_S)
    assert stream == 0, "the handle that a caller may not take for `no stream`"
    assert rig.finish(STORE, [3], [5], after=stream).status is Status.DONE
    assert (rig.slots[5] == 7).all()


def test_a_load_comes_after_block_zeroing(make_rig: MakeRig, device: StandIn | Cuda) -> None:
    rig = make_rig(1, MIB)
    rig.slots[5] = 9
    stream = device.slow_fill(rig, rig.vram[0, 3], 0, DELAY_S)
    assert rig.finish(LOAD, [3], [5], after=stream).status is Status.DONE
    rig.finish(STORE, [7], [7], after=stream)  # the zeroing is over now, whoever was first
    assert (rig.bytes_of(3) == 9).all()


def test_a_transfer_cancelled_before_its_stream_is_ready_copies_nothing(
    make_rig: MakeRig, device: StandIn | Cuda
) -> None:
    rig = make_rig(1, MIB)
    rig.slots[:] = 3
    stream = device.slow_fill(rig, rig.vram[0, 0], 1, DELAY_S * 4)
    tag = rig.submit(STORE, [1, 2], [1, 2], after=stream)
    rig.engine.cancel(tag)
    completion = rig.settle(tag)
    assert (completion.status, completion.num_bytes) == (Status.CANCELLED, 0)
    torch_done(rig)
    assert (rig.slots == 3).all()


def test_a_transfer_cancelled_under_way_says_how_much_it_copied(make_rig: MakeRig) -> None:
    rig = make_rig(1, 2 * MIB, num_blocks=64, trunk_bytes=MIB, window_bytes=MIB)
    rig.slots[:] = 0
    torch_done(rig)
    every = list(range(64))
    tag = rig.submit(STORE, every, every)
    rig.engine.cancel(tag)
    completion = rig.settle(tag)
    assert completion.status in (Status.CANCELLED, Status.DONE)
    assert int((rig.slots != 0).sum()) == completion.num_bytes  # no byte of VRAM is 0


def test_a_slot_that_changed_is_found_by_its_checksum(make_rig: MakeRig) -> None:
    rig = make_rig(checksum_every=1)
    torch_done(rig)
    assert rig.finish(STORE, [1, 2], [1, 2]).status is Status.DONE
    assert rig.finish(LOAD, [4], [1]).status is Status.DONE
    rig.slots[2, 3, 100] ^= 1
    completion = rig.finish(LOAD, [5], [2])
    assert (completion.status, completion.error) == (Status.FAILED, CORRUPT)
    assert rig.engine.stats().num_corrupt == 1


def test_slots_of_a_growing_pool_can_be_used_once_they_are_ready(make_rig: MakeRig) -> None:
    rig = make_rig(1, 2 * MIB, num_blocks=256, first_bytes=4 * MIB, chunk_bytes=4 * MIB)
    state = rig.engine.pool_state()
    assert state.ready_bytes >= 2 * 2 * MIB
    if rig.vram.is_cuda:  # where pages are locked, 127 chunks follow
        assert state.ready_bytes < state.mapped_bytes
        assert state.is_growing
    torch_done(rig)
    rig.finish(STORE, [1], [1])
    assert rig.engine.pool.wait(30.0)
    assert not rig.engine.pool_state().why
    rig.finish(STORE, [2], [255])
    assert np.array_equal(rig.slots[255], rig.bytes_of(2))


def test_a_graph_is_captured_while_the_lane_looks_and_copies_and_the_pool_grows(
    make_rig: MakeRig, device: StandIn | Cuda
) -> None:
    """As while a server captures its graphs: what our threads ask of the driver must not end it."""
    is_gpu = device.driver == "cuda"
    num_blocks, num_slots = (256, 4096) if is_gpu else (8, 32)  # a pool of 8 GiB grows for seconds
    rig = make_rig(
        1, 2 * MIB, num_blocks=num_blocks, num_slots=num_slots, trunk_bytes=2 * MIB,
        first_bytes=2 * (num_blocks + 1) * 2 * MIB, chunk_bytes=64 * MIB,
    )  # fmt: skip
    numbers, sums = (torch.zeros(1024, device=device.where) for _ in range(2))

    def work() -> None:
        for _ in range(500):
            sums.add_(numbers)

    work()  # a kernel is loaded by its first launch, which is nothing for a capture
    stream = device.slow_fill(rig, rig.vram[0, 0], 7, DELAY_S * 10)
    blocks = list(range(1, num_blocks))
    copies = [
        rig.submit(STORE, blocks, [first + block for block in blocks]) for first in (0, num_blocks)
    ]
    behind = rig.submit(STORE, [0], [0], after=stream)
    replay = device.capture(work)
    is_growing = rig.engine.pool_state().is_growing
    settled = {each.tag: each.status for each in rig.engine.poll()}
    assert behind not in settled, "the lane asked its event all the while"
    assert is_growing or not is_gpu, "pages were locked all the while"
    for tag in (*copies, behind):
        assert rig.engine.wait(tag, 30.0)
    settled |= {each.tag: each.status for each in rig.engine.poll()}
    assert settled == dict.fromkeys((*copies, behind), Status.DONE)
    sums.zero_()
    numbers.fill_(2)
    torch_done(rig)
    replay()
    assert (sums == 1000).all()
    assert rig.engine.pool.wait(60.0)
    assert not rig.engine.pool_state().why
    assert (rig.slots[0] == 7).all()
    for first in (0, num_blocks):
        assert np.array_equal(rig.slots[first + 5], rig.bytes_of(5))


LOSE_CONTEXT = """
import sys
from continuum_connector.errors import TransferError
from continuum_connector.worker.abi import Direction
from tests.gpu.conftest import {name}, GpuRig, torch
from tests.native import sim
rig = GpuRig({name}(), 1, 4096)
print(rig.finish(Direction.STORE, [1], [1]).status.name)
if rig.vram.is_cuda:
    index = torch.tensor([1 << 30], device="cuda")
    try:
        torch.zeros(4, device="cuda").index_select(0, index).cpu()
    except RuntimeError:
        pass
else:
    sim.fail_after(rig.engine, 0, code=700)
for _ in range(2):
    try:
        print(rig.finish(Direction.STORE, [2], [2]).status.name)
    except TransferError as error:
        print("refused", file=sys.stdout)
        print(error, file=sys.stderr)
rig.engine.close(1.0)
print("left")
"""


@pytest.mark.parametrize("kind", DEVICES)
def test_a_lost_context_fails_transfers_and_the_process_can_leave(kind: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOSE_CONTEXT.format(name=kind.__name__)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.split()
    assert lines[0] == "DONE", done.stderr
    assert set(lines[1:-1]) <= {"FAILED", "refused"}, done.stderr
    assert lines[-1] == "left", done.stderr
    assert done.returncode == 0
