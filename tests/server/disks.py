"""What the tests of a disk under real servers share: its server, its lives, its bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA
from continuum_connector.scheduler.tiers.disk_saving import SPARE_S
from tests.server.altered import transfer_config
from tests.server.conftest import MIDDLEWARE, NUM_BLOCKS
from tests.server.helpers import (
    BLOCK,
    Dialog,
    ask,
    eventually,
    in_flight,
    last,
    play,
    text_of,
    told,
)

BLOCK_BYTES = BLOCK * LLAMA.kv_bytes_per_token()
SLOT_BLOCKS = 2  # as altered/disk_always.py has it
NUM_DRAM, NUM_DISK = 80, 3000  # blocks; the programs of helpers.py take about 180
_STRIDE = 4096 + SLOT_BLOCKS * BLOCK_BYTES
_SLOTS_AT = 2**20


def with_disk(folder: Path, altered: str = "disk_always", **more: Any) -> dict[str, Any]:
    """Options of a server with less DRAM than its programs take, and a disk below it."""
    keys = {
        "policy": "fixed_ttl",
        "ttl_s": 0,
        "dram_bytes": NUM_DRAM * BLOCK_BYTES,
        "disk_path": str(folder),
        "disk_bytes": NUM_DISK * BLOCK_BYTES,
        "disk_write_budget": 0,
        "disk_timeout_s": 20,  # a busy machine is slow
        **more,
    }
    config = transfer_config(altered, keys)
    return {"num_blocks": NUM_BLOCKS, "kv_transfer_config": config, "args": MIDDLEWARE}


def is_up(server: VllmServer) -> bool:
    return server.metric("continuum:disk_up") == 1


def on_disk(server: VllmServer) -> float:
    return server.metric("continuum:disk_blocks", state="ready")


def disk_hits(server: VllmServer) -> float:
    """Tokens that came from the disk so far."""
    return server.metric("continuum:hit_tokens_total", tier="disk")


def failures(server: VllmServer, reason: str) -> float:
    return server.metric("continuum:disk_failures_total", reason=reason)


def computed(server: VllmServer) -> float:
    """Prompt tokens that no cache had."""
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def quiet(server: VllmServer) -> None:
    """Until nothing is copied any more, for as long as passes between two looks at what there is
    to save. Before all is known that a restart found, nothing is saved at all."""
    last_written, since = -1.0, 0.0

    def is_quiet() -> bool:
        nonlocal last_written, since
        nudge(server)
        written, now = server.metric("continuum:disk_written_bytes_total"), time.monotonic()
        is_new = is_up(server) and not server.metric("continuum:disk_budget_fill")
        if is_new or in_flight(server) or written != last_written:
            last_written, since = written, now
        return now - since > 1.5 * SPARE_S

    eventually(is_quiet)


def play_saved(server: VllmServer, programs: list[Dialog]) -> list[list[list[int]]]:
    """As `play`, each once all of the one before is on disk.

    What leaves DRAM before it was saved is lost, and how much of it does is up to the drive.
    """
    answers = []
    for each in programs:
        answers += play(server, [each])
        quiet(server)
    return answers


def nudge(server: VllmServer) -> None:
    """A step, for it is by steps that workers report."""
    ask(server, "completions", [" a"], 1, **last())


def flush(server: VllmServer, seed: str) -> None:
    """Take all of VRAM and most of DRAM, so that what others left is on disk alone."""
    for n in range(2):
        ask(server, "completions", [text_of((NUM_BLOCKS - 2) * BLOCK, f"{seed} {n}")], 4)
        quiet(server)


def kill(server: VllmServer) -> None:
    """As by a lack of memory: no process of the server ends in order."""
    os.killpg(server.pid, signal.SIGKILL)
    eventually(lambda: not server.alive())
    server.stop()


def turns(programs: list[Dialog], number: int) -> list[Dialog]:
    """The first turns of each."""
    return [Dialog(each.name, each.prompt, each.tools[: number - 1]) for each in programs]


def last_turns(programs: list[Dialog], answers: list[list[list[int]]]) -> list[Dialog]:
    """Of programs that got these answers before: what each asks next."""
    found = []
    for each, before in zip(programs, answers, strict=True):
        prompt = list(each.prompt)
        for ids, tool in zip(before, each.tools, strict=True):
            prompt += ids + tool
        found.append(Dialog(each.name, prompt, []))
    return found


def slab(folder: Path) -> Path:
    return folder / "dp0-rank0.slab"


def flip(folder: Path, slots: Iterable[int], bit: int = 12_345) -> None:
    """Turn over a bit in the payload of each slot."""
    with open(slab(folder), "r+b") as file:
        for slot in slots:
            file.seek(_SLOTS_AT + slot * _STRIDE + 4096 + bit // 8)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << bit % 8]))


def cached(server: VllmServer, prompt: list[int]) -> dict[str, int]:
    """Of a prompt's tokens, how many each tier had."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    found = told(server.post("/v1/completions", body))["cached_tokens"]
    assert isinstance(found, dict)
    return found


def used(folder: Path) -> set[int]:
    """The slots that hold something."""
    with open(slab(folder), "rb") as file:
        found = set()
        for slot in range(NUM_DISK):
            file.seek(_SLOTS_AT + slot * _STRIDE)
            if file.read(4) == b"CKVD":
                found.add(slot)
        return found
