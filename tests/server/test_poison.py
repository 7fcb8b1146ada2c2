"""The device context ends while a server copies: no tier from there on, and everybody's answer.

That is forced: a plugin in the worker holds the simulated driver's copies from one program's store
on. Once the others' loads are behind it, the next driver call says that the context has ended.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from tests.markdown import ROOT
from tests.server.alerts import firing
from tests.server.conftest import DRAM_BYTES, ServerFactory, Stock
from tests.server.helpers import (
    BLOCK,
    PROGRAMS,
    Dialog,
    ask,
    eventually,
    in_flight,
    install_plugin,
    last,
    ledger_closes,
    log_of,
    play,
    play_at_once,
    read_trace,
    terminate,
    text_of,
    tokens_of,
    usage,
)

MAX_TOKENS = 24
HELD = """
import threading
import time
from pathlib import Path

from continuum_connector.worker.abi import Direction
from continuum_connector.worker.native import NativeEngine
from tests.native import sim

HOLD = Path({hold!r})
submit = NativeEngine.submit

def end_context(engine):
    while HOLD.exists():
        time.sleep(0.01)
    sim.fail_after(engine, 0, code=700)
    sim.release(engine)

def held(engine, direction, *args, **kwargs):
    if direction is Direction.STORE and HOLD.exists():
        sim.hold(engine)
        threading.Thread(target=end_context, args=(engine,), daemon=True).start()
    submit(engine, direction, *args, **kwargs)

def register():
    NativeEngine.submit = held
"""
NUM_BLOCKS = 257  # the longest context, and the null block
WRITER = Dialog("writer", tokens_of(640, "writer"), [tokens_of(2000, "what it read")])


def num_stored(dialog: Dialog, num_turns: int) -> int:
    """Blocks in DRAM after these turns: the last token's KV is never computed."""
    num_tokens = len(dialog.prompt) + sum(map(len, dialog.tools[: num_turns - 1]))
    return (num_tokens + num_turns * MAX_TOKENS - 1) // BLOCK


NUM_FIRST = sum(num_stored(dialog, 2) for dialog in PROGRAMS)
NUM_WRITER = num_stored(WRITER, 1)  # stored, and loaded for its second turn
SENTENCE = (
    "No DRAM tier on this rank: the copy engine failed: CUDA error 700; "
    "what leaves VRAM is computed again until the server is restarted"
)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """From the first store on after this file is made no copy ends; once it is gone, the context
    ends."""
    return tmp_path / "hold"


@pytest.fixture
def server(server_factory: ServerFactory, stock: Stock, hold: Path, tmp_path: Path) -> VllmServer:
    """Turns leave for DRAM at once. (It starts once stock's server is gone.)"""
    plugin = install_plugin(tmp_path, "held_copies", HELD.format(hold=str(hold)))
    return server_factory(
        "poison",
        num_blocks=NUM_BLOCKS,
        connector={
            "policy": "fixed_ttl",
            "ttl_s": 0,
            "max_head_start_s": 0,  # in vLLM's own order no load waits until the bus is free
            "dram_bytes": DRAM_BYTES,
            "trace_path": str(tmp_path / "trace.jsonl"),
        },
        env={
            "PYTHONPATH": os.pathsep.join((str(ROOT), plugin)),
        },
        args=("--shutdown-timeout", "60"),
    )


def first_turns(dialog: Dialog) -> Dialog:
    return Dialog(dialog.name, dialog.prompt, dialog.tools[:-1])


def last_turn(dialog: Dialog, answers: list[list[int]]) -> Dialog:
    """Of a program that got these answers before."""
    prompt = list(dialog.prompt)
    for ids, tool in zip(answers, dialog.tools, strict=True):
        prompt += ids + tool
    return Dialog(dialog.name, prompt, [])


def only_in_dram(server: VllmServer, hold: Path) -> None:
    """All that was stored is there, and a turn that is not stored has taken all of VRAM; the next
    store is held."""
    eventually(lambda: server.metric("continuum:stored_blocks_total") == NUM_FIRST + NUM_WRITER)
    num_tokens = (NUM_BLOCKS - 1) * BLOCK
    ask(server, "completions", [text_of(num_tokens - 4, "flush")], 4, **last())
    hold.touch()


def failed(server: VllmServer) -> tuple[float, float]:
    """Loads and stores that did."""
    loads = server.metric("continuum:loads_total", outcome="failed")
    return loads, server.metric("continuum:stores_total", outcome="failed")


def test_the_context_ends_amid_copies_and_the_server_lives(
    server: VllmServer, stock: Stock, hold: Path, tmp_path: Path
) -> None:
    well = server.metrics()
    # Some stores and a load are done; then a store is in flight, with loads behind it.
    first = play_at_once(server, [first_turns(dialog) for dialog in PROGRAMS])
    written = play(server, [WRITER], before_last=lambda: only_in_dram(server, hold))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(play_at_once, server, list(map(last_turn, PROGRAMS, first)))
        eventually(lambda: in_flight(server) >= 3)
        hold.unlink()
        behind = asked.result()
    assert [a + b for a, b in zip(first, behind, strict=True)] == stock.answers

    eventually(lambda: in_flight(server) == 0 and usage(server) == 0)
    assert server.healthy()
    assert server.metric("continuum:tier_up") == 0
    assert server.metric("continuum:dram_capacity_blocks") == 0
    num_loads, num_stores = failed(server)
    print(f"\n{num_loads:.0f} loads and {num_stores:.0f} stores failed")
    assert num_loads >= 2
    assert num_stores == 1
    assert server.metric("continuum:transfer_failures_total", reason="driver") >= 2
    assert server.metric("continuum:loads_total", outcome="done") >= 1
    assert ledger_closes(server.metrics())
    assert log_of(server).count(SENTENCE) == log_of(server).count("No DRAM tier") == 1
    assert "Traceback" not in log_of(server)

    broken = server.metrics()

    # From here on nothing is offloaded, nothing is promised, and the answers are the same.
    admitted = server.metric("continuum:transfers_admitted_total")
    assert play_at_once(server, PROGRAMS) == stock.answers
    assert play(server, [WRITER], cold=True) == written
    eventually(lambda: usage(server) == 0)
    assert server.metric("continuum:transfers_admitted_total") == admitted
    assert failed(server) == (num_loads, num_stores)

    after = server.metrics()

    assert terminate(server) == 0
    (down,) = [r for r in read_trace(tmp_path / "trace.jsonl") if r["event"] == "tier_down"]
    assert down["reason"] in SENTENCE
    down_and_failing = {"ContinuumTierDown", "ContinuumTransfersFailing"}
    assert firing(well, broken, tmp_path) == down_and_failing
    nothing_is_tried = firing(broken, after, tmp_path, well)
    assert nothing_is_tried == {"ContinuumTierDown"}
