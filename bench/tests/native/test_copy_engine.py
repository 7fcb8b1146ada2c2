"""bench/copy_engine: every section runs at tiny sizes, and its tables say what was measured: over
the simulated driver, and those of a device over a libcuda of our own as well."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

from bench.copy_engine import run
from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Section, Target
from bench.copy_engine.rig import Rig, another_core, same_cores_afterwards, threads
from bench.copy_engine.sizes import KIB, MIB, Sizes
from tests.native.libcuda import python_over

# So little that every section runs in a moment.
TINY = Sizes(
    blocks=(1, 8),
    regions=(1, 4),
    calls=4,
    steps=3,
    step_s=0.002,
    handed_blocks=8,
    handed_bytes=4 * KIB,
    chunks=(4 * KIB, 64 * KIB),
    repeats=1,
    peak_bytes=MIB,
    counts=(4,),
    sweep_bytes=MIB,
    fed_s=0.1,  # shorter, nothing is counted on a busy machine
    work_units=4,
    arm_s=0.005,
    decode_bytes=MIB,
    small_pieces=(4 * KIB,),
    small_pieces_per_block=4,
)


@pytest.mark.parametrize("name", run.ALL_SECTIONS)
def test_each_section_measures_and_fills_its_table(name: str) -> None:
    """Those of a device too, over the stand-in: only what torch does for them is not run."""
    said: list[str] = []
    with same_cores_afterwards():
        section = run.ALL_SECTIONS[name](Machine(), TINY, said.append)
    assert said
    assert_complete(section)


def assert_complete(section: Section) -> None:
    assert section.rows
    assert {len(row) for row in section.rows} == {len(section.header)}
    assert section.samples
    for name, samples in section.samples.items():
        assert samples, name
        assert all(math.isfinite(each) and each > 0 for each in samples), name
    assert section.title in section.markdown()


def test_main_prints_tables_and_writes_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "QUICK", TINY)
    out = tmp_path / "samples.json"
    assert run.main(["--quick", "--only", "submit", "--json", str(out), "--note", "shared"]) == 0
    printed = capsys.readouterr().out
    assert "shared" in printed
    assert "| at work |" in printed
    (section,) = json.loads(out.read_text())
    assert len(section["samples"]["1 blocks, 1 regions, at work"]) >= TINY.calls


def test_an_unknown_section_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--only", "submit,speed"])
    assert "'speed' is not a section; known: submit" in capsys.readouterr().err


def test_a_target_says_pass_or_fail_in_its_own_direction() -> None:
    assert str(Target("delay", 4.0, 5.0, "ms")) == "PASS  delay: 4.0 ms, aim <= 5"
    assert str(Target("delay", 6.0, 5.0, "ms")).startswith("FAIL")
    assert str(Target("rate", 6.0, 5.0, "GB/s", at_most=False)).startswith("PASS")
    assert str(Target("rate", 4.0, 5.0, "GB/s", at_most=False)).startswith("FAIL")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_measured_threads_share_no_core_with_the_caller() -> None:
    """The lane leaves the core of a pinned opener by itself: for the caller's, if it is let."""
    before, others = os.sched_getaffinity(0), threads()
    with same_cores_afterwards():
        with another_core():
            rig = Rig(Machine(), 8, 64).started()
        with rig:
            begun = {name_of(thread): thread for thread in threads() - others}
            assert "ckv-lane" in begun
            for name, thread in begun.items():
                assert not os.sched_getaffinity(thread) & os.sched_getaffinity(0), name
    assert os.sched_getaffinity(0) == before


def name_of(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()


# --- as on a GPU --------------------------------------------------------------------------
SECTIONS = """
import ctypes, json
from dataclasses import asdict
from bench.copy_engine import run
from bench.copy_engine.machine import Machine
from bench.tests.native.test_copy_engine import TINY

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_broken_rule.restype = ctypes.c_char_p
kept = []  # what is freed could come back at the same address with another size

class FakeGpu(Machine):
    name, driver = "fake device", "cuda"

    def vram(self, num_bytes):
        kept.append(super().vram(num_bytes))
        fake.fake_cuda_add_vram(ctypes.c_void_p(kept[-1].data_ptr()), ctypes.c_uint64(num_bytes))
        return kept[-1]

run.QUICK = TINY
options = run.parse(["--quick", "--only", ",".join(run.DEVICE_SECTIONS)])
found = run.measure(options, FakeGpu(), lambda _: None)
print(json.dumps([fake.fake_cuda_broken_rule().decode(), [asdict(each) for each in found]]))
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
    for name in ("device_submit", "device_delay"):  # what is measured on both names its machine
        for named in (on_fake_gpu[name]["title"], *on_fake_gpu[name]["targets"]):
            assert "(fake device)" in str(named)
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
