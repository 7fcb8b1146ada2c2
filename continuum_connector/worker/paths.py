"""Logs at the start which ways of copying an engine has. If a driver or device lacks one, the
engine uses the others, so nothing else would show it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection

logger = logging.getLogger(f"vllm.{__name__}")

# What a path was made for: the driver's CUDA, and the release it came with.
MADE_FOR = {
    "batch": (12080, 570),  # cuMemcpyBatchAsync
    "gather": (12000, 525),  # the compiler of csrc/gather_fatbin.inc
}
WITHOUT = {
    "batch": "no batch, so each piece is a call of its own",
    "gather": "no gather kernel for loads of small pieces, which go as all others",
}


def tell_paths(driver: str, paths: Collection[str]) -> None:
    """Log the paths (`batch`, `loop`, `gather`) that the engine found over `driver` when opened."""
    logger.info("%s", describe(driver, paths, cuda_version() if driver == "cuda" else 0))


def describe(driver: str, paths: Collection[str], version: int) -> str:
    """The line. `version`: of CUDA in the driver, 12080 is 12.8; 0: it did not say, or no CUDA."""
    over = "the simulator" if driver == "sim" else f"CUDA {_dotted(version)}".rstrip()
    said = f"blocks are copied over {over} by {', '.join(paths)}"
    for path, (needed, release) in MADE_FOR.items():
        if path in paths:
            continue
        is_old = 0 < version < needed
        why = f"made for CUDA {_dotted(needed)}, driver {release}" if is_old else "refused here"
        said += f"; {WITHOUT[path]} ({why})"
    return said


def cuda_version() -> int:
    """What the loaded driver says; 0 if it says nothing. Needs no context; microseconds."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""
