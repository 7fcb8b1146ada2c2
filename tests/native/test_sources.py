"""The C++ sources: their own tests, and what only a compiler can check."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from tests.native.cpp import REPO, built, needs_cmake, needs_compiler, run

FATBIN = REPO / "csrc/gather_fatbin.inc"
CUDA_HEADERS = [*Path("/usr/local").glob("cuda*/include"), Path("/usr/include")]
# A toolkit's headers as if they were older: the names that 12.8 brought may not be used.
BEFORE_12_8 = """
#include <cuda.h>
#include <cudaTypedefs.h>
#undef CUDA_VERSION
#define CUDA_VERSION 12040
#pragma GCC poison CUmemcpyAttributes PFN_cuMemcpyBatchAsync_v12080
#pragma GCC poison CU_MEMCPY_SRC_ACCESS_ORDER_STREAM CU_MEMCPY_SRC_ACCESS_ORDER_ANY
"""


@needs_compiler
@needs_cmake
def test_the_engine_passes_its_own_tests() -> None:
    assert "tests passed" in run(built("debug", "ckv_tests") / "ckv_tests")


@needs_compiler
def test_declarations_are_those_of_the_cuda_header() -> None:
    _check_declarations()


@needs_compiler
def test_declarations_are_compared_on_a_toolkit_without_batch_copies(tmp_path: Path) -> None:
    older = tmp_path / "older.h"
    older.write_text(BEFORE_12_8)
    _check_declarations("-include", older)


def _check_declarations(*options: str | Path) -> None:
    folder = next((f for f in CUDA_HEADERS if (f / "cudaTypedefs.h").is_file()), None)
    if folder is None:
        pytest.skip("needs a CUDA toolkit's headers")
    run("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{folder}",
         *options, "csrc/check_abi.cpp")  # fmt: skip


def test_the_kernels_code_is_that_of_its_source() -> None:
    source = (REPO / "csrc/gather.cu").read_bytes()
    assert FATBIN.read_text().splitlines()[0].endswith(hashlib.sha256(source).hexdigest()), (
        "csrc/gather.cu has changed; run scripts/gather"
    )


@pytest.mark.skipif(shutil.which("fatbinary") is None, reason="needs a CUDA toolkit")
def test_the_kernels_code_is_what_its_compiler_makes_of_it_in_32_registers(tmp_path: Path) -> None:
    try:
        said = run("scripts/gather", tmp_path / "made.inc")
    except AssertionError as error:
        if "No matching distribution" in str(error):
            pytest.skip("needs pip to fetch the compiler")
        raise
    assert (tmp_path / "made.inc").read_text() == FATBIN.read_text()
    assert re.search(r"Used (\d+) registers", said)[1] == "32"  # type: ignore[index]


def _sources() -> list[str]:
    found = re.search(r"set\(CKV_SOURCES\s+([^)]*)\)", (REPO / "CMakeLists.txt").read_text())
    assert found is not None
    return found[1].split()


def test_each_source_is_built() -> None:
    sources = {path.relative_to(REPO).as_posix() for path in (REPO / "csrc").glob("*.cpp")}
    assert sources - set(_sources()) == {"csrc/check_abi.cpp"}  # compiled beside a cuda.h only


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_takes_the_sources(tmp_path: Path) -> None:
    for source in _sources():
        run("nvcc", "-std=c++17", "-c", "-o", tmp_path / "out.o", source)
