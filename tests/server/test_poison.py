"""The device context ends while a server copies: no tier from there on, and everybody's answer.

The simulated driver ends it after so many copy calls. A copy call is one block here, so that is
forced: it falls into the last turns, with one program's store half done and the others' loads
behind it. Everything is slow enough for them to be there by then.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from bench.serve.tiny_model import LLAMA
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
BLOCK_BYTES = BLOCK * LLAMA.kv_bytes_per_token()
SMALL_TRUNKS = f"""
import functools

from continuum_connector.worker import native

def register():
    trunks = {{"trunk_bytes": {BLOCK_BYTES}, "window_bytes": {4 * BLOCK_BYTES}}}
    native.Tuning = functools.partial(native.Tuning, **trunks)
"""
NUM_BLOCKS = 257  # the longest context, and the null block
MBPS = 2  # 150 ms for a block
# Its second turn stores 63 blocks, which takes 9 s.
WRITER = Dialog("writer", tokens_of(640, "writer"), [tokens_of(2000, "what it read")])


def num_stored(dialog: Dialog, num_turns: int) -> int:
    """Blocks in DRAM after these turns: the last token's KV is never computed."""
    num_tokens = len(dialog.prompt) + sum(map(len, dialog.tools[: num_turns - 1]))
    return (num_tokens + num_turns * MAX_TOKENS - 1) // BLOCK


NUM_FIRST = sum(num_stored(dialog, 2) for dialog in PROGRAMS)
NUM_WRITER = num_stored(WRITER, 1)  # stored, and loaded for its second turn
FAIL_AFTER = NUM_FIRST + 2 * NUM_WRITER + 50
SENTENCE = (
    "No DRAM tier on this rank: the copy engine failed: CUDA error 700; "
    "what leaves VRAM is computed again until the server is restarted"
)


@pytest.fixture
def server(server_factory: ServerFactory, stock: Stock, tmp_path: Path) -> VllmServer:
    """Turns leave for DRAM at once. (It starts once stock's server is gone.)"""
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
            "CKV_SIM_MBPS": str(MBPS),
            "CKV_SIM_FAIL_AFTER": str(FAIL_AFTER),
            "PYTHONPATH": install_plugin(tmp_path, "small_trunks", SMALL_TRUNKS),
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


def only_in_dram(server: VllmServer) -> None:
    """All that was stored is there, and a turn that is not stored has taken all of VRAM."""
    eventually(lambda: server.metric("continuum:stored_blocks_total") == NUM_FIRST + NUM_WRITER)
    num_tokens = (NUM_BLOCKS - 1) * BLOCK
    ask(server, "completions", [text_of(num_tokens - 4, "flush")], 4, **last())


def failed(server: VllmServer) -> tuple[float, float]:
    """Loads and stores that did."""
    loads = server.metric("continuum:loads_total", outcome="failed")
    return loads, server.metric("continuum:stores_total", outcome="failed")


def test_the_context_ends_amid_copies_and_the_server_lives(
    server: VllmServer, stock: Stock, tmp_path: Path
) -> None:
    well = server.metrics()
    # Some stores and a load are done; then a store is in flight, and everybody wants to load.
    first = play_at_once(server, [first_turns(dialog) for dialog in PROGRAMS])
    written = play(server, [WRITER], before_last=lambda: only_in_dram(server))
    behind = play_at_once(server, list(map(last_turn, PROGRAMS, first)))
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
