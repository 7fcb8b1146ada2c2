"""What the CUDA driver says about itself and its GPUs; Machine.ask runs this in its own process.

It makes no context, so it takes no VRAM, and a busy or exclusive GPU can be checked too.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any


def look() -> dict[str, Any]:
    """The fields of `CudaSeen`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"trouble": str(error)}
    found: dict[str, Any] = {"has_library": True, "library": _library_version()}
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    found["version"] = version.value
    if code := driver.cuInit(0):
        return {**found, "code": code, "trouble": _name_of(driver, code)}
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {**found, "gpus": [_gpu(driver, index) for index in range(count.value)]}


def _gpu(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    driver.cuDeviceGetPCIBusId(bus, len(bus), device)
    return {
        "name": name.value.decode(errors="replace"),
        "pci_id": bus.value.decode(errors="replace").lower(),
        "num_bytes": size.value,
    }


def _name_of(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"an error").decode(errors="replace")


def _library_version() -> str:
    """The release of the mapped libcuda, by its file's name; "" if it does not say."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcuda.so" in path:
            return path.rpartition("libcuda.so.")[2] if path.count(".") > 2 else ""
    return ""


if __name__ == "__main__":
    print(json.dumps(look()))
