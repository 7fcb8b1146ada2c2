"""Whether an installation is whole, where nothing else is: no vLLM, no torch, no GPU, no clone.

python -I scripts/try_install.py    with the Python of a bare environment; scripts/wheel does
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np

import continuum_connector
from continuum_connector.worker.abi import Direction, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine

BLOCKS, BYTES = 8, 4096


def main() -> None:
    assert Path(continuum_connector.__file__).is_relative_to(sys.prefix), "not the installed one"
    assert continuum_connector.__version__ == importlib.metadata.version("continuum-connector")
    assert importlib.util.find_spec("vllm") is None, "this environment is not bare"
    there_and_back()
    commands()


def there_and_back() -> None:
    """A block goes to DRAM and comes back, over the library's simulated driver."""
    vram = np.random.default_rng(1).integers(1, 256, (BLOCKS, BYTES), dtype=np.uint8)
    was = vram.copy()
    region = Region(vram.ctypes.data, BYTES, 0, BYTES)
    engine = NativeEngine("sim", Layout((region,), BLOCKS, BYTES, "cpu", 0), BLOCKS)
    try:
        blocks, slots = np.array([2, 5], np.int32), np.array([0, 7], np.int32)
        for tag, direction in enumerate((Direction.STORE, Direction.LOAD), start=1):
            engine.submit(direction, blocks, slots, tag)
            assert engine.wait(tag, 20.0), "a copy did not end"
            vram[blocks] = 0 if direction is Direction.STORE else vram[blocks]
        assert (vram == was).all(), "what came back is not what was stored"
    finally:
        engine.close(10.0)


def commands() -> None:
    """The command line answers, and says what it lacks in one sentence."""
    command = str(Path(sys.executable).with_name("continuum"))

    def ask(*words: str) -> tuple[int, str]:
        done = subprocess.run([command, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    status, text = ask("--help")
    assert status == 0, text
    assert "check" in text, text
    status, text = ask("check")
    assert status == 1, text
    assert "vllm" in text.lower(), text
    assert "Traceback" not in text, text


if __name__ == "__main__":
    main()
