"""Whether the native library loads and copies; Machine.ask runs this in its own process."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from continuum_connector.errors import TransferError
from continuum_connector.worker import abi

SIMULATOR = 2  # CKV_DRIVER_SIM


def look() -> dict[str, Any]:
    """The fields of `NativeSeen`. An engine is opened over the simulator: no GPU is touched."""
    try:
        path = str(abi.find_library())
        blocking, quick = abi.load_library()
    except TransferError as error:
        return {"trouble": str(error)}
    config = abi.Config(size=ctypes.sizeof(abi.Config), abi=abi.ABI_VERSION, driver=SIMULATOR)
    engine = ctypes.c_void_p()
    if blocking.ckv_open(ctypes.byref(config), ctypes.byref(engine)):
        return {"path": path, "trouble": quick.ckv_last_error().decode(errors="replace")}
    blocking.ckv_free(engine)
    return {"path": path, "abi": abi.ABI_VERSION}


if __name__ == "__main__":
    print(json.dumps(look()))
