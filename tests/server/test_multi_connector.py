"""Ours first, LMCache behind it: vLLM's MultiConnector as the way to a tier beyond one machine."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from bench.serve.rivals import FOLDER, LMCACHE_ENV, LmcacheServer, install, missing
from bench.serve.server import VllmServer
from tests.server.conftest import DRAM_BYTES, NUM_BLOCKS, ServerFactory, Stock
from tests.server.helpers import (
    PROGRAMS,
    ask,
    dram_hits,
    eventually,
    last,
    ledger_closes,
    log_of,
    play,
    reset,
    text_of,
    told,
)

# The server and vLLM alike; LMCache's packages lie in a folder of their own.
ENV = {**LMCACHE_ENV, "PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """LMCache's server; it outlives the vLLM servers of this module."""
    if missing(FOLDER, on_cpu=True):
        try:
            install()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"LMCache cannot be installed: {error}")
    with LmcacheServer(2**30, chunk=32, on_cpu=True, env=ENV) as server:
        yield server.port


def both(port: int, **ours: Any) -> dict[str, Any]:
    """--kv-transfer-config as docs/beyond-one-machine.md gives it."""
    first = {"kv_connector": "ContinuumConnector"}
    second = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
        },
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{**first, "kv_connector_extra_config": ours}, second]
        },
    }


def attach(server_factory: ServerFactory, name: str, port: int) -> VllmServer:
    """A replica: its own VRAM and DRAM, and the store that all replicas share."""
    config = both(port, policy="fixed_ttl", ttl_s=50, dram_bytes=DRAM_BYTES)
    return server_factory(name, num_blocks=NUM_BLOCKS, kv_transfer_config=config, env=ENV)


def remote_hits(server: VllmServer) -> float:
    """Tokens that came from a connector, but not from ours."""
    return server.metric("vllm:external_prefix_cache_hits_total") - dram_hits(server)


def computed(server: VllmServer) -> float:
    """Prompt tokens that no tier had."""
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def test_hits_come_from_ours_first_then_from_lmcache_and_answers_are_those_of_a_stock_server(
    server_factory: ServerFactory, store: int, stock: Stock
) -> None:
    server = attach(server_factory, "multi", store)
    assert play(server, PROGRAMS) == stock.answers
    ours = eventually(lambda: dram_hits(server))
    reset(server)  # empties both our tiers; LMCache keeps what it has
    known = remote_hits(server)
    assert play(server, PROGRAMS) == stock.answers
    remote = eventually(lambda: remote_hits(server) - known)
    print(f"\n{ours:.0f} tokens from our DRAM; when it is empty, {remote:.0f} from LMCache")


def test_inside_the_multi_connector_we_are_attached_as_alone(
    server_factory: ServerFactory, store: int
) -> None:
    server = attach(server_factory, "multi", store)
    said = re.findall(r"ContinuumConnector attached to \w+: (.*)", log_of(server))
    assert said == ["pins yield, turns wait in program order"]
    assert server.metric("continuum:pins_ended_total", cause="returned") > 0
    assert server.metric("continuum:pins_ended_total", cause="pressure") > 0, "inside allocations"
    eventually(lambda: ledger_closes(server.metrics()))
    answer = ask(server, "completions", [text_of(100, "echo")], **last())
    assert told(answer)["decision"] == "free"


def test_another_replica_finds_what_the_first_one_left_in_the_shared_tier(
    server_factory: ServerFactory, store: int, stock: Stock
) -> None:
    attach(server_factory, "multi", store)  # the tests above have played the programs on it
    server_factory.stop("multi")
    second = attach(server_factory, "second", store)
    assert play(second, PROGRAMS) == stock.answers
    print(f"\n{remote_hits(second):.0f} tokens from LMCache, {computed(second):.0f} computed")
    assert computed(second) < 0.25 * second.metric("vllm:prompt_tokens_total")
