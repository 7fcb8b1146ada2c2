"""bench/copy_engine as on a GPU: over a libcuda of our own, and torch on the CPU for its part."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

from bench.copy_engine import run
from bench.copy_engine.machine import SMALL_WIDTH, Device
from bench.copy_engine.rig import same_cores_afterwards
from bench.tests.native.test_copy_engine import assert_complete
from bench.tests.native.tiny import TINY
from tests.native.libcuda import python_over

SECTIONS = """
import ctypes, json
from bench.copy_engine import run
from bench.copy_engine.machine import Machine
from bench.tests.native.tiny import TINY

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_broken_rule.restype = ctypes.c_char_p
kept = []  # what is freed could come back at the same address with another size

class FakeGpu(Machine):
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


@pytest.mark.parametrize("name", ["device_submit", "device_delay"])
def test_what_is_measured_on_both_names_its_machine(on_fake_gpu: dict[str, Any], name: str) -> None:
    section = on_fake_gpu[name]
    assert "(fake device)" in section["title"]
    assert all("(fake device)" in target["text"] for target in section["targets"])


def test_the_delay_of_a_device_has_the_target(on_fake_gpu: dict[str, Any]) -> None:
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
def torch_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A Device whose device is the CPU, with the simulator for an engine."""
    import torch

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
    monkeypatch.setattr(Device, "width", SMALL_WIDTH)
    machine = Device(0)
    machine.where, machine.driver = "cpu", "sim"
    return machine


@pytest.mark.parametrize("name", run.DEVICE_SECTIONS)
def test_each_section_runs_over_a_torch_machine(torch_on_cpu: Device, name: str) -> None:
    with same_cores_afterwards():
        assert_complete(run.ALL_SECTIONS[name](torch_on_cpu, TINY, lambda _: None))
