"""Lines on the native library, asked in a process of its own, and what copies."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from continuum_connector.errors import TransferError
from continuum_connector.tools.checks.line import Line, error, ok, unseen, warning
from continuum_connector.tools.checks.machine import Facts
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.worker import abi

SIMULATOR = 2  # CKV_DRIVER_SIM


def look() -> dict[str, Any]:
    """The fields of `NativeSeen`. An engine is opened over the simulator: no GPU is touched."""
    try:
        path = str(abi.find_library())
        blocking, quick = abi.load_library()
    except TransferError as failure:
        return {"trouble": str(failure)}
    config = abi.Config(size=ctypes.sizeof(abi.Config), abi=abi.ABI_VERSION, driver=SIMULATOR)
    engine = ctypes.c_void_p()
    if blocking.ckv_open(ctypes.byref(config), ctypes.byref(engine)):
        return {"path": path, "trouble": quick.ckv_last_error().decode(errors="replace")}
    blocking.ckv_free(engine)
    return {"path": path, "abi": abi.ABI_VERSION}


def who_copies(plan: Plan, seen: Facts) -> str:
    """cuda or sim, as build.worker chooses by the device; "" where the device is not known."""
    if plan.config.driver != "auto":
        return plan.config.driver
    by_platform = {"cuda": "cuda", "cpu": "sim"}.get(seen.vllm.platform, "")
    return by_platform or ("cuda" if seen.cuda.gpus else "")


def line(plan: Plan, seen: Facts) -> Line:
    """Does it load, and over which driver will it copy?"""
    if seen.native.trouble:
        if not plan.config.dram_bytes:
            text = f"{seen.native.trouble} No matter without a DRAM tier"
            return warning("native library", text, "install the package again")
        return error("native library", seen.native.trouble, "install the package again")
    library = f"loads (ABI {seen.native.abi})"
    driver = who_copies(plan, seen)
    if driver == "sim" and seen.vllm.platform == "cuda":
        text = f"{library}, but driver = sim cannot copy from a GPU"
        return error("native library", text, "leave driver at auto")
    if driver == "cuda" and not seen.cuda.gpus:
        text = f"{library}; driver = cuda without a GPU here"
        return unseen("native library", text, "run this where the server runs")
    if not driver:
        return unseen("native library", f"{library}; who copies depends on the server's device")
    over = "CUDA" if driver == "cuda" else "the simulated driver"
    return ok("native library", f"{library} and copies over {over}")


if __name__ == "__main__":
    print(json.dumps(look()))
