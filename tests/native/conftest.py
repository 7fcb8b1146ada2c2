"""The native engine over fake VRAM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from continuum_connector.errors import TransferError
from continuum_connector.messages import BlockIds
from continuum_connector.worker.abi import Completion, Direction, Region, find_library
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine, Tuning
from tests.native.libcuda import compile_libcuda

_HERE = Path(__file__).parent
LIMIT_S = 300.0  # for what ends by itself, on however slow a machine or disk


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that is tests/native/fake_cuda.cpp."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    compile_libcuda(_HERE / "fake_cuda.cpp", folder)
    return folder


def ids(*values: int) -> BlockIds:
    return np.array(values, dtype=np.int32)


class Rig:
    """16 blocks of two pieces (K and V apart), 24 slots, an engine between them."""

    NUM_BLOCKS = 16
    NUM_SLOTS = 24
    PIECE = 4096

    def __init__(self, driver: str = "sim", **tuning_of: Any) -> None:
        random = np.random.default_rng(7)
        shape = (2, self.NUM_BLOCKS, self.PIECE)
        self.vram: npt.NDArray[np.uint8] = random.integers(1, 256, shape, dtype=np.uint8)
        regions = [
            Region(self.vram[i].ctypes.data, self.PIECE, i * self.PIECE, self.PIECE)
            for i in range(2)
        ]
        layout = Layout(tuple(regions), self.NUM_BLOCKS, 2 * self.PIECE, "cpu", 0)
        tuning = Tuning(**{"checksum_every": 1, **tuning_of})
        self.engine = NativeEngine(driver, layout, self.NUM_SLOTS, tuning)

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        return self.engine.pool.view().reshape(self.NUM_SLOTS, 2, self.PIECE)[index]

    def finish(
        self, direction: Direction, blocks: BlockIds, slots: BlockIds, tag: int
    ) -> Completion:
        self.engine.submit(direction, blocks, slots, tag)
        assert self.engine.wait(tag, LIMIT_S)
        (completion,) = self.engine.poll()
        return completion


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    try:
        find_library()
    except TransferError as error:
        pytest.skip(str(error))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.engine.close(5.0)
