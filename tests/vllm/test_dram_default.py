"""The size that nobody wrote is the same in both halves, in other processes and at other times."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from continuum_connector import memory
from continuum_connector.build import with_default_dram
from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import ConfigError
from continuum_connector.memory import Spare
from continuum_connector.vllm import attach, served
from tests.vllm import kv_caches
from tests.vllm.test_worker_start import BLOCK_BYTES, layers, server

GIB = 2**30
NUM_BLOCKS = 8


def without_size(**extra: Any) -> Any:
    config = server(**extra)
    del config.kv_transfer_config.kv_connector_extra_config["dram_bytes"]
    return config


def seen(monkeypatch: pytest.MonkeyPatch, usable: int) -> None:
    """The node has so many bytes to spare, now."""
    monkeypatch.setattr(memory, "look", lambda environ: Spare("the machine", usable))


def kv_cache() -> Any:
    config = server()
    if kv_caches.LAYOUTS:
        config.cache_config.kv_cache_layout = kv_caches.LAYOUTS[0]
    return kv_caches.describe(config, layers(), NUM_BLOCKS)


def half(config: Any, role: KVConnectorRole) -> Any:
    return KVConnectorFactory.create_connector(pickle.loads(pickle.dumps(config)), role, kv_cache())


def test_both_halves_have_the_size_of_when_the_server_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = without_size()
    seen(monkeypatch, 4 * GIB)
    attach.prepare(config)
    seen(monkeypatch, 0)  # vLLM's processes have taken it meanwhile
    sizes = [half(config, role).config.tier_bytes for role in KVConnectorRole]
    assert sizes == [NUM_BLOCKS * BLOCK_BYTES] * 2
    assert served.may_have_tier(ContinuumConfig(), config), "so a layout is asked for"


def test_a_node_that_spares_nothing_has_no_tier_in_either(monkeypatch: pytest.MonkeyPatch) -> None:
    config = without_size()
    seen(monkeypatch, 0)
    attach.prepare(config)
    seen(monkeypatch, 4 * GIB)
    assert [half(config, role).config.tier_bytes for role in KVConnectorRole] == [0, 0]
    assert not served.may_have_tier(ContinuumConfig(), config)


def test_a_config_that_nobody_prepared_has_no_tier() -> None:
    config = without_size()
    assert [half(config, role).config.tier_bytes for role in KVConnectorRole] == [0, 0]


@pytest.mark.parametrize("dram_bytes", [0, "2MiB"])
def test_what_is_written_wins_and_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, dram_bytes: object
) -> None:
    config = server(dram_bytes=dram_bytes)
    seen(monkeypatch, 4 * GIB)
    attach.prepare(config)
    assert served.spare(config) is None
    tiers = [half(config, role).config.tier_bytes for role in KVConnectorRole]
    assert tiers == [2 * 2**20 if dram_bytes else 0] * 2


@pytest.mark.parametrize(("ranks", "caches"), [(1, 1), (2, 2), (8, 8)])
def test_all_ranks_of_a_node_count(
    monkeypatch: pytest.MonkeyPatch, ranks: int, caches: int
) -> None:
    """Tensor parallel ranks and engines share one DRAM, and have a KV cache each."""
    config = without_size()
    seen(monkeypatch, 4 * GIB)
    attach.prepare(config)
    monkeypatch.setattr(served, "num_node_ranks", lambda _: ranks)
    found = with_default_dram(ContinuumConfig(), config, kv_cache())
    assert found.tier_bytes == caches * NUM_BLOCKS * BLOCK_BYTES


def test_chains_that_are_stored_whole_or_not_at_all_wait_for_no_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that finds no room is no order, so the pool would stay at its first GiB."""
    config = without_size()
    seen(monkeypatch, 4 * GIB)
    attach.prepare(config)
    groups = SimpleNamespace(are_simple=False)
    monkeypatch.setattr(served, "read_groups", lambda *_: groups)
    found = with_default_dram(ContinuumConfig(), config, kv_cache())
    assert found.dram is not None
    assert (found.dram.num_bytes > 0, found.dram.num_left) == (True, 0)


@pytest.mark.parametrize(("sleeps", "released"), [(False, "keep"), (True, "release")])
def test_a_sleeping_server_gives_back_what_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool, released: str
) -> None:
    """vLLM copies the weights to DRAM when it sleeps."""
    config = without_size()
    seen(monkeypatch, 4 * GIB)
    attach.prepare(config)
    config.model_config.enable_sleep_mode = sleeps
    assert with_default_dram(ContinuumConfig(), config, kv_cache()).sleep_dram == released
    written = with_default_dram(ContinuumConfig(dram_bytes=GIB), config, kv_cache())
    assert written.sleep_dram == "keep"


@pytest.mark.parametrize("key", ["distributed_executor_backend", "data_parallel_backend"])
def test_with_ray_nobody_looks_at_this_node(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    config = without_size()
    seen(monkeypatch, 4 * GIB)
    setattr(config.parallel_config, key, "ray")
    attach.prepare(config)
    assert served.spare(config) is None


def test_on_another_platform_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    config = without_size()
    seen(monkeypatch, 4 * GIB)
    attach.prepare(config)
    monkeypatch.setattr(served, "platform", lambda: "rocm")
    found = with_default_dram(ContinuumConfig(), config, kv_cache())
    assert found.dram == (0, "the copy engine does not know the platform `rocm`", 1)


def test_a_disk_on_several_nodes_needs_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    config = without_size(disk_path="/no/drive", disk_bytes="1GiB")
    config.parallel_config.nnodes = 2
    with pytest.raises(ConfigError, match=r"on several nodes without dram_bytes .* set dram_bytes"):
        attach.prepare(config)
