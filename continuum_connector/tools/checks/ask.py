"""What vLLM, the CUDA driver, our native library and the disk tier's folder say about themselves.

Machine.ask runs this file in a process of its own for each question: vLLM prints, a driver may
crash, a disk may hang, and none of that reaches the check.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from continuum_connector.errors import TransferError


def look_at_vllm(*words: str) -> dict[str, Any]:
    """The fields of `VllmSeen`; "trouble" where vLLM or our plugin cannot be imported. `words`: the
    options of `vllm serve`, for vLLM itself to read and to make the model's KV cache of."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    os.environ |= OFFLINE
    real = {}  # what it really serves on
    try:
        if words:  # make vLLM believe in a GPU, if this release has what that takes
            with contextlib.suppress(ImportError, AttributeError):
                from continuum_connector.vllm import pretend

                real = {"platform": pretend.play_cuda()}
        from continuum_connector.vllm import planned, plugin

        found = planned.about_vllm() | real
    except Exception as error:  # the user must read whatever a broken install raises
        return {"is_installed": True, "trouble": f"{type(error).__name__}: {error}"}
    found["plugin_trouble"] = ", and ".join(plugin.set_up())
    try:
        found |= read_words(words) if words else {}
    except Exception as error:  # this vLLM builds its parser in another way
        found["unread"] = f"vLLM's parser cannot be asked, {type(error).__name__}: {error}"
    return {"is_installed": True, **found}


# No network, no statistics, no log but what ends it.
OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    **dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """What vLLM's parser says of the options, and what its engine would make of them."""
    from continuum_connector.tools.checks.plan import Options
    from continuum_connector.vllm import planned

    options, found = planned.read_by_vllm(words, Options.__dataclass_fields__)
    if options is None:
        return found
    try:
        return found | {"kv": planned.kv(options)}
    except planned.RefusedError as why:
        return found | {"refused": str(why)}
    except planned.NotSeenError as why:
        return found | {"not_seen": str(why)}


def look_at_cuda() -> dict[str, Any]:
    """The fields of `CudaSeen`. Makes no context: that would take VRAM, and a GPU that is busy or
    set to exclusive use can be checked too."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"trouble": str(error)}
    found: dict[str, Any] = {"has_library": True}
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    found["version"] = version.value
    if code := driver.cuInit(0):
        said = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(said))
        trouble = (said.value or b"an error").decode(errors="replace")
        return {**found, "code": code, "trouble": trouble}
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    driver.cuDeviceGetCount(ctypes.byref(count))
    found["gpus"] = []
    for index in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        driver.cuDeviceGetPCIBusId(bus, len(bus), device)
        model, pci_id = (each.value.decode(errors="replace") for each in (name, bus))
        gpu = {"name": model, "pci_id": pci_id.lower(), "num_bytes": size.value}
        found["gpus"].append(gpu)
    return found


SIMULATOR = 2  # CKV_DRIVER_SIM in csrc/ckv.h


def look_at_native() -> dict[str, Any]:
    """The fields of `NativeSeen`. Opens an engine over the simulator, so no GPU is touched."""
    from continuum_connector.worker import abi

    try:
        blocking, quick = abi.load_library()
    except TransferError as failure:
        return {"trouble": str(failure)}
    config = abi.Config(size=ctypes.sizeof(abi.Config), abi=abi.ABI_VERSION, driver=SIMULATOR)
    engine = ctypes.c_void_p()
    if blocking.ckv_open(ctypes.byref(config), ctypes.byref(engine)):
        return {"trouble": quick.ckv_last_error().decode(errors="replace")}
    blocking.ckv_free(engine)
    return {"abi": abi.ABI_VERSION}


def look_at_disk(path: str) -> dict[str, Any]:
    """The fields of `DiskSeen`. Makes no folder, and a file without a name, so nothing is left."""
    wanted, exists = Path(path), os.path.lexists(path)
    place = wanted if exists else wanted.parent  # the server makes the last folder, none above it
    try:
        if wanted.is_symlink():
            return {"trouble": "it is a symbolic link, which may be pointed elsewhere"}
        if not place.is_dir():
            none = "is not there, and only the last folder is made"
            what = "is no folder" if place.exists() else none
            return {"trouble": f"{'it' if exists else place} {what}"}
        room, rights = os.statvfs(place), place.stat()
        with tempfile.TemporaryFile(dir=place):
            slabs = {one.name: one.stat().st_blocks * 512 for one in wanted.glob("dp*-rank*.slab")}
    except OSError as why:
        return {"trouble": f"no file can be made in {path} ({why.strerror})"}
    return {
        "place": str(place.resolve()),
        "exists": exists,
        "mode": stat.S_IMODE(rights.st_mode),
        "is_ours": rights.st_uid == os.geteuid(),
        "num_bytes": room.f_blocks * room.f_frsize,
        "free_bytes": room.f_bavail * room.f_frsize,
        "slabs": slabs,
    }


ABOUT: dict[str, Callable[..., dict[str, Any]]] = {
    "vllm": look_at_vllm,
    "cuda": look_at_cuda,
    "native": look_at_native,
    "disk": look_at_disk,
}

if __name__ == "__main__":
    print(json.dumps(ABOUT[sys.argv[1]](*sys.argv[2:]), default=str))
