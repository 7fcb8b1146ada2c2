"""Compiles a kernel by a given NVRTC: nvrtc.py LIBRARY SOURCE OUT...

Each OUT is named sm_N.cubin, for machine code, or compute_N.ptx.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any


def main(library: str, source: str, *outs: str) -> None:
    # It loads this one by its name, from wherever it was loaded.
    builtins = next(Path(library).parent.glob("libnvrtc-builtins.so.*"))
    ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(library)
    for out in map(Path, outs):
        out.write_bytes(
            compiled(nvrtc, Path(source), out.stem, "PTX" if out.suffix == ".ptx" else "CUBIN")
        )


def compiled(nvrtc: Any, source: Path, arch: str, kind: str) -> bytes:
    """The code as PTX or CUBIN; SystemExit with the compiler's log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
    )
    options = [b"--std=c++17", f"--gpu-architecture={arch}".encode()]
    code = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    if code:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(f"NVRTC: {code}\n{log.value.decode()}")
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, found)
    return found.raw.rstrip(b"\0") + b"\n" if kind == "PTX" else found.raw


if __name__ == "__main__":
    main(*sys.argv[1:])
