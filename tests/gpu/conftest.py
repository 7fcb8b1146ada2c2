"""Devices the tests run on: a GPU where there is one, and a stand-in so that the tests are run too.

The stand-in is the simulator over torch memory of the CPU. It shows that a test is right, and
nothing about a device; the tests of the GPU carry the mark `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from continuum_connector.worker.abi import Completion, Direction, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine, Tuning
from tests.native import sim
from tests.native.conftest import _library as _library  # a fixture: skips all without the library

torch = pytest.importorskip("torch")

KIB, MIB = 1 << 10, 1 << 20
CYCLES_PER_S = 2e9  # of torch's sleeping kernel: no device is much faster
Tensor = Any


class StandIn:
    """The simulator, and memory of this process."""

    driver, where = "sim", "cpu"

    def slow_fill(self, rig: GpuRig, target: Tensor, value: int, delay_s: float) -> int:
        """A stream that sets `target` after a while; its handle."""
        stream = sim.stream(rig.engine)
        sim.compute(rig.engine, stream, delay_s, target.data_ptr(), value, target.numel())
        return stream

    def slow_fill_on_default(self, target: Tensor, value: int, delay_s: float) -> int:
        """The same on the default stream; its handle. A simulated device has computed by then."""
        target.fill_(value)
        return 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as a graph, not run; what replays it. Here there is nothing to capture."""
        return work


class Cuda:
    """The first device torch sees."""

    driver, where = "cuda", "cuda:0"

    def slow_fill(self, rig: GpuRig, target: Tensor, value: int, delay_s: float) -> int:
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay_s * CYCLES_PER_S))
            target.fill_(value)
        rig.streams.append(stream)
        return int(stream.cuda_stream)

    def slow_fill_on_default(self, target: Tensor, value: int, delay_s: float) -> int:
        torch.cuda.synchronize()
        stream = torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay_s * CYCLES_PER_S))
            target.fill_(value)
        return int(stream.cuda_stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        # Not by torch.cuda.graph: that begins with a synchronize, so no copy would be under way.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="global")  # the strictest
            work()
            graph.capture_end()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return replay


class GpuRig:
    """`num_regions` regions of `piece` bytes over a torch tensor, one engine."""

    def __init__(
        self,
        device: StandIn | Cuda,
        num_regions: int,
        piece: int,
        num_blocks: int = 16,
        num_slots: int = 0,
        **tuning: Any,
    ) -> None:
        num_slots = num_slots or num_blocks
        self.shape = (num_regions, num_blocks, piece)
        self.vram: Tensor = torch.randint(
            1, 256, self.shape, dtype=torch.uint8, device=device.where
        )
        regions = [
            Region(self.vram[i].data_ptr(), piece, i * piece, piece) for i in range(num_regions)
        ]
        self.streams: list[Any] = []  # a stream must outlive what is queued on it
        layout = Layout(tuple(regions), num_blocks, num_regions * piece, device.where, 0)
        self.engine = NativeEngine(device.driver, layout, num_slots, Tuning(**tuning))
        self.slots = self.engine.pool.view().reshape(num_slots, num_regions, piece)
        self._tag = 0

    def submit(self, way: Direction, blocks: list[int], slots: list[int], after: int = 0) -> int:
        self._tag += 1
        ids = (np.array(each, dtype=np.int32) for each in (blocks, slots))
        self.engine.submit(way, *ids, self._tag, after_stream=after)
        return self._tag

    def settle(self, tag: int) -> Completion:
        assert self.engine.wait(tag, 30.0)
        (completion,) = self.engine.poll()
        assert completion.tag == tag
        return completion

    def finish(
        self, way: Direction, blocks: list[int], slots: list[int], after: int = 0
    ) -> Completion:
        return self.settle(self.submit(way, blocks, slots, after))

    def has_path(self, bit: int) -> bool:
        return bool(self.engine.stats().paths >> bit & 1)

    def bytes_of(self, block: int) -> np.ndarray[Any, Any]:
        """A block as the CPU sees it: (region, byte)."""
        found: np.ndarray[Any, Any] = self.vram[:, block].cpu().numpy()
        return found


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = [
    pytest.param(StandIn, id="stand-in", marks=pytest.mark.native),
    pytest.param(Cuda, id="cuda", marks=[pytest.mark.gpu, NO_CUDA]),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> StandIn | Cuda:
    made: StandIn | Cuda = request.param()
    return made


@pytest.fixture
def make_rig(device: StandIn | Cuda) -> Iterator[Callable[..., GpuRig]]:
    rigs: list[GpuRig] = []

    def make(num_regions: int = 4, piece: int = 32 * KIB, **options: Any) -> GpuRig:
        rigs.append(GpuRig(device, num_regions, piece, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.close(10.0)
        assert not rig.engine.is_left_behind
