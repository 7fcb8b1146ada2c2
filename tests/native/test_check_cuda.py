"""`continuum check` asks libcuda over ctypes: here a libcuda of our own answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.tools.checks.machine import this_machine

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

LIBCUDA = r"""
#include <cstdlib>
#include <cstring>
extern "C" {
int cuDriverGetVersion(int *out) { *out = 12080; return 0; }
int cuInit(unsigned) {
  if (getenv("FAKE_CRASH")) abort();
  return getenv("FAKE_INIT") ? atoi(getenv("FAKE_INIT")) : 0;
}
int cuGetErrorName(int code, const char **out) {
  *out = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : nullptr;
  return 0;
}
int cuDeviceGetCount(int *out) { *out = 2; return 0; }
int cuDeviceGet(int *out, int index) { *out = index + 70; return 0; }
int cuDeviceGetName(char *out, int size, int) { strncpy(out, "NVIDIA Test", size); return 0; }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = device * 1000ull; return 0; }
int cuDeviceGetPCIBusId(char *out, int size, int device) {
  strncpy(out, device == 70 ? "0000:0A:00.0" : "0001:FF:00.0", size);
  return 0;
}
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library is."""
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "fake.cpp").write_text(LIBCUDA)
    library = folder / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, folder / "fake.cpp"], check=True)
    return folder


def ask(folder: Path, **environ: str) -> dict[str, Any]:
    found = {**os.environ, "LD_LIBRARY_PATH": str(folder), **environ}
    return this_machine(found).ask("cuda")


def test_driver_and_gpus(folder: Path) -> None:
    assert ask(folder) == {
        "has_library": True,
        "version": 12080,
        "gpus": [
            {"name": "NVIDIA Test", "pci_id": "0000:0a:00.0", "num_bytes": 70_000},
            {"name": "NVIDIA Test", "pci_id": "0001:ff:00.0", "num_bytes": 71_000},
        ],
    }


@pytest.mark.parametrize(
    ("code", "name"), [("803", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), ("5", "an error")]
)
def test_a_driver_that_does_not_start_says_why(folder: Path, code: str, name: str) -> None:
    found = ask(folder, FAKE_INIT=code)
    assert (found["code"], found["trouble"]) == (int(code), name)
    assert "gpus" not in found


def test_a_driver_that_crashes_does_not_take_the_check_along(folder: Path) -> None:
    assert ask(folder, FAKE_CRASH="1") == {"trouble": "exit status -6"}


def test_no_library(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    found = ask(tmp_path)
    assert "has_library" not in found
    assert "libcuda.so.1" in found["trouble"]
