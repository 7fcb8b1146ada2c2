"""Which ways of copying there are: what the engine says, and the log's line on it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from continuum_connector.worker.native import describe, tell_paths
from tests.native.conftest import Rig
from tests.native.libcuda import compile_libcuda, python_over

ALL = ("batch", "loop", "gather")
NO_KERNEL = "no gather kernel for loads of small pieces, which go as all others"
VERSION = """
from continuum_connector.worker.native import cuda_version
print(cuda_version())
"""
OLD_DRIVER = 'extern "C" int cuDriverGetVersion(int *out) { *out = 12080; return 0; }'


def test_the_engine_says_and_the_log_tells_what_was_offered_at_the_open(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.engine.paths == ALL
    with caplog.at_level(logging.INFO, logger="vllm.continuum_connector.worker.native"):
        tell_paths("sim", rig.engine.paths)
    assert caplog.messages == ["blocks are copied over the simulator by batch, loop, gather"]


@pytest.mark.parametrize(
    ("paths", "version", "expected"),
    [
        (ALL, 13000, "CUDA 13.0 by batch, loop, gather"),
        (ALL, 0, "CUDA by batch, loop, gather"),
        (ALL[:2], 11080, f"CUDA 11.8 by batch, loop; {NO_KERNEL} (made for CUDA 12.0, driver 525)"),
        (ALL[:2], 13010, f"CUDA 13.1 by batch, loop; {NO_KERNEL} (refused here)"),
        (
            ("loop",),
            11080,
            "CUDA 11.8 by loop; no batch, so each piece is a call of its own (made for CUDA 12.8, "
            f"driver 570); {NO_KERNEL} (made for CUDA 12.0, driver 525)",
        ),
    ],
)
def test_a_path_that_is_missing_is_told_with_what_it_was_made_for(
    paths: tuple[str, ...], version: int, expected: str
) -> None:
    assert describe("cuda", paths, version) == f"blocks are copied over {expected}"


def test_the_driver_is_asked_for_its_version(fake_cuda: Path, tmp_path: Path) -> None:
    assert python_over(VERSION, fake_cuda) == "0"  # the fake has no such call
    source = tmp_path / "old.cpp"
    source.write_text(OLD_DRIVER)
    compile_libcuda(source, tmp_path)
    assert python_over(VERSION, tmp_path) == "12080"
