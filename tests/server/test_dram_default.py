"""A server that nobody told how much DRAM to take has a tier, says how large, and hits in it."""

from __future__ import annotations

import re

import pytest

from bench.serve.server import VllmServer
from tests.server.conftest import NUM_BLOCKS, ServerFactory, Stock
from tests.server.helpers import PROGRAMS, dram_hits, eventually, log_of, play

ENOUGH = "the KV cache, which is less than a quarter of the"


@pytest.fixture
def by_default(server_factory: ServerFactory) -> VllmServer:
    """A server without `dram_bytes`; it pins nothing, so that what comes back comes from DRAM."""
    return server_factory(
        "by-default",
        num_blocks=NUM_BLOCKS,
        connector={"dram_bytes": None, "policy": "fixed_ttl", "ttl_s": 0},
    )


def test_a_server_takes_dram_by_default_says_so_in_one_line_and_hits_in_it(
    by_default: VllmServer, stock: Stock
) -> None:
    assert play(by_default, PROGRAMS) == stock.answers
    assert eventually(lambda: dram_hits(by_default)) > 0
    assert by_default.metric("continuum:tier_up") == 1
    blocks = by_default.metric("continuum:dram_capacity_blocks")
    assert blocks == NUM_BLOCKS, "on a CPU: as much as the KV cache"
    assert by_default.metric("continuum:dram_wanted_blocks") == blocks
    (line,) = re.findall(r"ContinuumConnector: DRAM tier .*", log_of(by_default))
    print(f"\n{line}")
    assert line.startswith(f"ContinuumConnector: DRAM tier of {NUM_BLOCKS} blocks of ")
    assert ENOUGH in line
    assert line.endswith("can spare; CONTINUUM_DRAM_BYTES sets it, 0 turns it off")
