"""Tensor parallel ranks, hybrid KV groups, async scheduling: each with pins and the tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from bench.serve.tiny_model import LLAMA, make_model
from tests.server.conftest import ServerFactory
from tests.server.helpers import (
    dialogs,
    dram_hits,
    eventually,
    install_plugin,
    ledger_closes,
    log_of,
    pins_live,
    play,
    reset,
    terminate,
)

TIER = {"policy": "fixed_ttl", "ttl_s": 50, "dram_bytes": "160MiB"}
PROGRAMS = dialogs(4, rounds=3, first=400, tool=200)
BLOCKS = 81  # less than the programs need together

ASYNC_PLUGIN = '''
"""Let CPU servers schedule asynchronously, as GPU servers do."""

def register():
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "_async_test"):
        return
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform._async_test = True
'''


def pins_and_dram_work(server: VllmServer, expected: list[list[list[int]]]) -> None:
    """Play the programs with everything on: the expected tokens, pins, stores, DRAM hits."""
    reset(server)
    known = dram_hits(server)
    started = server.metric("continuum:pins_started_total")
    assert play(server, PROGRAMS) == expected
    assert eventually(lambda: dram_hits(server) - known) >= 32
    eventually(lambda: ledger_closes(server.metrics()))
    assert server.metric("continuum:pins_started_total") >= started + len(PROGRAMS)
    assert server.metric("continuum:stored_blocks_total") > 0
    assert server.metric("continuum:transfer_failures_total") == 0
    assert pins_live(server) > 0
    reset(server)


def test_two_tensor_parallel_ranks_pin_store_and_load(server_factory: ServerFactory) -> None:
    shape = replace(LLAMA, heads=4, kv_heads=2)  # divisible by two
    server = server_factory(
        "tp2",
        model=make_model(shape),
        num_blocks=BLOCKS,
        connector=TIER,
        args=("--tensor-parallel-size", "2"),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    try:
        pins_and_dram_work(server, play(server, PROGRAMS, cold=True))
        num_bytes = server.metric("continuum:stored_bytes_total")
        num_blocks = server.metric("continuum:stored_blocks_total")
        assert num_bytes == num_blocks * 32 * shape.kv_bytes_per_token(), "both ranks' halves"
    finally:
        server_factory.stop("tp2")


def test_hybrid_kv_groups_pin_store_and_load(
    server_factory: ServerFactory, hybrid_model: Path
) -> None:
    options = {"num_blocks": 161, "max_model_len": 2048, "max_num_batched_tokens": 256}
    stock = server_factory("hybrid-stock", model=hybrid_model, **options)
    expected = play(stock, PROGRAMS)
    server_factory.stop("hybrid-stock")
    server = server_factory("hybrid", model=hybrid_model, connector=TIER, **options)
    try:
        pins_and_dram_work(server, expected)
    finally:
        server_factory.stop("hybrid")


@pytest.fixture(scope="module")
def async_server(
    server_factory: ServerFactory, tmp_path_factory: pytest.TempPathFactory
) -> VllmServer:
    """vLLM turns async scheduling off on CPU; a plugin of this test turns it on again."""
    folder = tmp_path_factory.mktemp("async-plugin")
    path = install_plugin(folder, "continuum_async_test", ASYNC_PLUGIN)
    server = server_factory(
        "async",
        num_blocks=BLOCKS,
        connector=TIER,
        args=("--scheduler-cls", "continuum_connector.scheduler_cls"),
        env={"PYTHONPATH": path},
    )
    if "attached to Scheduler" in log_of(server):
        pytest.skip("this vLLM does not schedule asynchronously on CPU, even when asked")
    return server


def test_async_scheduling_and_our_scheduler_named_on_the_command_line(
    async_server: VllmServer,
) -> None:
    assert "ContinuumConnector attached to AsyncScheduler" in log_of(async_server)
    pins_and_dram_work(async_server, play(async_server, PROGRAMS, cold=True))


def test_sigterm_without_grace_leaves_no_process(async_server: VllmServer) -> None:
    """vLLM's default (--shutdown-timeout 0): the API server kills the engine, pins or not."""
    play(async_server, PROGRAMS[:1])
    eventually(lambda: pins_live(async_server) == 1)
    terminate(async_server)
