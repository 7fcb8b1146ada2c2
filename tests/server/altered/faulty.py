"""The connector, with faults that the ladder asks for by a file: TEST_FAULT_FILE.

| it says | what happens to the next load | which process |
|---|---|---|
| `fail` | the simulated driver fails its first copy call, once | worker |
| `flip 2` | one byte of the newest block of KV group 2 that is loaded is wrong in DRAM | both |

Whoever does it removes the file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from continuum_connector.connector import ContinuumConnector as ContinuumConnector
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.worker.abi import Direction
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import HostPool, NativeEngine
from tests.native import sim

FILE = Path(os.environ["TEST_FAULT_FILE"])
# The upper byte of a float32 and of a bfloat16: their number becomes one of 2**15 to 2**17, so that
# nothing overflows. A state begins with a short convolution's, smaller than this in tiny models.
BYTE, VALUE = 16 * 1024 + 3, 0x47

_load, _submit, _set_regions = DramTier.load, NativeEngine.submit, HostPool.set_regions
_slot_bytes: dict[int, int] = {}  # by the address of a pool


def load(
    self: DramTier,
    program: str,
    request: Any,
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
    now: float,
) -> Any:
    """Say which VRAM blocks the group's are, for a worker does not know."""
    word, _, group = wanted().partition(" ")
    if word == "flip":
        say("blocks " + " ".join(str(each) for each in block_ids[int(group)] if each))
    return _load(self, program, request, block_ids, num_tokens, now)


def submit(self: NativeEngine, direction: Direction, blocks: Any, slots: Any, *more: Any) -> None:
    word, _, named = wanted().partition(" ")
    if direction is Direction.LOAD and word == "fail":
        sim.fail_after(self, 0)
        FILE.unlink()
    if direction is Direction.LOAD and word == "blocks":
        slot_of = dict(zip(blocks.tolist(), slots.tolist(), strict=True))
        loaded = [slot_of[each] for each in map(int, named.split()) if each in slot_of]
        if loaded:
            flip(self, loaded[-1])
            FILE.unlink()
    _submit(self, direction, blocks, slots, *more)


def flip(engine: NativeEngine, slot: int) -> None:
    base = engine.pool.base
    ctypes.c_uint8.from_address(base + slot * _slot_bytes[base] + BYTE).value = VALUE


def set_regions(self: HostPool, layout: Layout, num_slots: int) -> None:
    _slot_bytes[self.base] = layout.slot_bytes
    _set_regions(self, layout, num_slots)


def wanted() -> str:
    return FILE.read_text() if FILE.exists() else ""


def say(text: str) -> None:
    draft = FILE.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(FILE)


DramTier.load = load  # type: ignore[method-assign]
HostPool.set_regions = set_regions  # type: ignore[method-assign]
NativeEngine.submit = submit  # type: ignore[method-assign, assignment]
