"""The C++ tests under the sanitizers; tests/server/test_lifetime.py serves under one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.cpp import built, needs_cmake, needs_compiler, run

pytestmark = [needs_compiler, needs_cmake]


def _has_sanitizer(name: str, folder: Path) -> bool:
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    probe = folder / "probe"
    built = subprocess.run(
        ["g++", f"-fsanitize={name}", str(source), "-o", str(probe)], capture_output=True
    )
    return built.returncode == 0 and subprocess.run([str(probe)]).returncode == 0


@pytest.mark.parametrize(
    ("preset", "sanitizers"), [("asan", "address,undefined"), ("tsan", "thread")]
)
def test_engine_is_clean_under_the_sanitizer(preset: str, sanitizers: str, tmp_path: Path) -> None:
    if not _has_sanitizer(sanitizers, tmp_path):
        pytest.skip(f"this compiler cannot link or start programs with -fsanitize={sanitizers}")
    assert "tests passed" in run(built(preset, "ckv_tests") / "ckv_tests")


def test_random_calls_of_the_c_abi_are_clean_under_asan(tmp_path: Path) -> None:
    if not _has_sanitizer("address,undefined", tmp_path):
        pytest.skip("this compiler cannot link or start programs with AddressSanitizer")
    assert "1500 runs passed" in run(built("asan", "fuzz_abi") / "fuzz_abi", "1500", "1")


def test_random_files_and_calls_of_a_disk_are_clean_under_asan(tmp_path: Path) -> None:
    if not _has_sanitizer("address,undefined", tmp_path):
        pytest.skip("this compiler cannot link or start programs with AddressSanitizer")
    assert "500 runs passed" in run(built("asan", "fuzz_disk") / "fuzz_disk", "500", "1")
