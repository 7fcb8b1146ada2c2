"""The DRAM tier never changes an answer, and the test that says so would notice if it did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from tests.server.alerts import firing
from tests.server.conftest import DRAM_BYTES, MIDDLEWARE, NUM_BLOCKS, ServerFactory, Stock
from tests.server.helpers import (
    PROGRAMS,
    dialogs,
    dram_hits,
    eventually,
    in_flight,
    overwrite_dram,
    play,
    reset,
)

Answers = list[list[list[int]]]


@pytest.fixture
def expected(stock: Stock) -> Answers:
    """What a stock server answers, with the same VRAM."""
    return stock.answers


def test_a_server_without_our_flag_shows_no_trace_of_us(stock: Stock) -> None:
    assert "continuum" not in stock.metrics.lower()
    log = stock.log.split("\n", 1)[1]  # without the command line, which names a path
    assert "continuum" not in re.sub(r"/\S*", "", log).lower()


def test_answers_from_dram_are_token_for_token_those_of_a_stock_server(
    agents: VllmServer, expected: Answers
) -> None:
    reset(agents)
    known = dram_hits(agents)
    assert play(agents, PROGRAMS) == expected
    hits = eventually(lambda: dram_hits(agents) - known)
    print(f"\n{hits:.0f} prompt tokens came from DRAM")
    assert agents.metric("continuum:loads_total", outcome="failed") == 0


def test_the_comparison_fails_when_dram_is_overwritten(
    agents: VllmServer, expected: Answers
) -> None:
    reset(agents)
    known = dram_hits(agents)
    answers = play(agents, PROGRAMS, before_last=lambda: overwrite(agents))
    eventually(lambda: dram_hits(agents) > known)
    assert first_turns(answers) == first_turns(expected), "nothing was overwritten yet"
    assert answers != expected, "the last turns read the bytes we wrote"
    reset(agents)
    assert play(agents, PROGRAMS) == expected, "a reset forgets what is in DRAM"


def test_overwritten_dram_is_noticed_and_computed_again(
    server_factory: ServerFactory, expected: Answers, tmp_path: Path
) -> None:
    summed = server_factory(
        "summed",
        num_blocks=NUM_BLOCKS,
        connector={
            "policy": "fixed_ttl",
            "ttl_s": 50,
            "dram_bytes": DRAM_BYTES,
            "checksum_every": 1,
        },
        args=MIDDLEWARE,
    )
    well = summed.metrics()
    answers = play(summed, PROGRAMS, before_last=lambda: overwrite(summed))
    assert answers == expected
    assert summed.metric("continuum:transfer_failures_total", reason="corrupt") > 0
    reset(summed)
    assert firing(well, summed.metrics(), tmp_path) == {"ContinuumCorruptBlocks"}


def first_turns(answers: Answers) -> Answers:
    return [turns[:-1] for turns in answers]


def overwrite(server: VllmServer) -> None:
    """Wrong values in the whole tier; skips where no process may write another one's memory."""
    try:
        overwrite_dram(server, DRAM_BYTES)
    except PermissionError as error:
        pytest.skip(f"this machine lets no process write another one's memory: {error}")


def test_a_block_is_stored_once_however_often_it_is_sent(agents: VllmServer) -> None:
    reset(agents)
    known = agents.metric("continuum:stored_blocks_total")
    one = dialogs(1, rounds=3, first=300, tool=100)
    play(agents, one)
    num_tokens = 300 + 2 * 100 + 3 * 24
    blocks = (num_tokens - 1) // 32
    eventually(lambda: agents.metric("continuum:stored_blocks_total") == known + blocks)
    play(agents, one)  # the same again: every block is there
    eventually(lambda: in_flight(agents) == 0)
    assert agents.metric("continuum:stored_blocks_total") == known + blocks
