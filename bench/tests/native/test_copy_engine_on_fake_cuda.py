"""bench/copy_engine as on a GPU: over a libcuda of our own, and torch on the CPU for its part."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from bench.copy_engine import run
from bench.copy_engine.rig import same_cores_afterwards
from bench.copy_engine.torch_machine import TorchMachine
from bench.copy_engine.torch_rivals import TorchRivals
from bench.tests.native.test_copy_engine import assert_complete
from bench.tests.native.tiny import TINY
from continuum_connector.worker.engine import Direction
from tests.native.libcuda import python_over

SECTIONS = """
import ctypes, json
from bench.copy_engine import run
from bench.copy_engine.machine import CpuMachine
from bench.tests.native.tiny import TINY

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_broken_rule.restype = ctypes.c_char_p
kept = []  # what is freed could come back at the same address with another size

class FakeGpu(CpuMachine):
    name, driver = "fake device", "cuda"

    def vram(self, num_bytes):
        kept.append(super().vram(num_bytes))
        fake.fake_cuda_add_vram(ctypes.c_void_p(kept[-1].address), ctypes.c_uint64(num_bytes))
        return kept[-1]

run.QUICK = TINY
options = run.parse(["--quick", "--only", ",".join(run.DEVICE_SECTIONS)])
found = run.measure(options, FakeGpu(), lambda _: None)
print(json.dumps([fake.fake_cuda_broken_rule().decode(), [each.as_json() for each in found]]))
"""


@pytest.fixture(scope="module")
def on_fake_gpu(fake_cuda: Path) -> dict[str, Any]:
    """Every device section, by name."""
    broken_rule, sections = json.loads(python_over(SECTIONS, fake_cuda))
    assert not broken_rule
    return {section["name"]: section for section in sections}


def test_every_device_section_runs_over_the_cuda_driver(on_fake_gpu: dict[str, Any]) -> None:
    assert list(on_fake_gpu) == list(run.DEVICE_SECTIONS)
    assert all(section["rows"] for section in on_fake_gpu.values())


@pytest.mark.parametrize("name", ["device_submit", "device_delay", "device_bandwidth"])
def test_what_is_measured_on_both_names_its_machine(on_fake_gpu: dict[str, Any], name: str) -> None:
    section = on_fake_gpu[name]
    assert "(fake device)" in section["title"]
    assert all("(fake device)" in target["text"] for target in section["targets"])


def test_the_delay_of_a_device_has_the_rivals_and_the_target(on_fake_gpu: dict[str, Any]) -> None:
    ways = [row[0] for row in on_fake_gpu["device_delay"]["rows"]]
    assert ways[:2] == ["engine", "Python thread, one copy"]
    (target,) = on_fake_gpu["device_delay"]["targets"]
    assert (target["limit"], target["unit"]) == (5.0, "ms")


def test_decode_beside_small_pieces_goes_by_the_kernel_and_without(
    on_fake_gpu: dict[str, Any],
) -> None:
    paths = {row[0]: row[1] for row in on_fake_gpu["decode"]["rows"]}
    assert paths == {
        "none": "-",
        "loads, pieces of 64 KiB": "batch",
        "stores, pieces of 64 KiB": "batch",
        "both, pieces of 64 KiB": "batch",
        "loads, pieces of 4 KiB, gather asked for": "gather",
        "stores, pieces of 4 KiB, gather asked for": "gather",
        "loads, pieces of 4 KiB, batch asked for": "batch",
        "stores, pieces of 4 KiB, batch asked for": "batch",
        "none, again": "-",
    }


# --- torch's part -----------------------------------------------------------------------
class CpuStream:
    """Of torch.cuda, where everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class CpuEvent:
    def __init__(self, **_: object) -> None: ...

    def record(self, _: object) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        return (later.at_s - self.at_s) * 1e3


@pytest.fixture
def torch_on_cpu(monkeypatch: pytest.MonkeyPatch) -> TorchMachine:
    """A TorchMachine whose device is the CPU, with the simulator for an engine."""
    torch = pytest.importorskip("torch")
    for name, value in {
        "set_device": lambda _: None,
        "get_device_name": lambda _: "torch of the CPU",
        "synchronize": lambda *_: None,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": CpuStream,
        "Event": CpuEvent,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("bench.copy_engine.torch_machine.WIDTH", 64)
    machine = TorchMachine(0)
    machine.where, machine.driver = "cpu", "sim"
    return machine


@pytest.mark.parametrize("name", run.DEVICE_SECTIONS)
def test_each_section_runs_over_a_torch_machine(torch_on_cpu: TorchMachine, name: str) -> None:
    with same_cores_afterwards():
        assert_complete(run.ALL_SECTIONS[name](torch_on_cpu, TINY, lambda _: None))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("way", ["each", "indexed"])
def test_torch_rivals_copy_block_to_slot_and_back(
    torch_on_cpu: TorchMachine, way: str, direction: Direction
) -> None:
    rivals = torch_on_cpu.rivals(4, 8)
    blocks, slots = (np.array(each, dtype=np.int32) for each in ([2, 0], [1, 3]))
    vram, pool = rivals._vram, rivals._slots
    (src, at), (dst, to) = ((vram, blocks), (pool, slots))
    if direction is Direction.LOAD:
        (src, at), (dst, to) = (dst, to), (src, at)
    dst.zero_()
    src[:] = src.new_tensor(range(1, 33)).view(4, 8)
    copied = copy_by(rivals, way, direction, blocks, slots)
    assert copied == 2 * 8
    for one, other in zip(at, to, strict=True):
        assert (dst[other] == src[one]).all()
    assert int((dst != 0).any(1).sum()) == 2


def copy_by(rivals: TorchRivals, way: str, direction: Direction, *ids: Any) -> int:
    if way == "each":
        return rivals.each(direction, *ids, 10.0)
    rivals.indexed(direction, *ids)()
    return 2 * 8
