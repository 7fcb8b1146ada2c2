"""The worker half at start: the KV cache it asks vLLM for, what it makes of it, who copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, ParallelConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from bench.sim import versions
from continuum_connector import build
from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.vllm import plugin
from continuum_connector.worker import disk, native
from continuum_connector.worker.abi import Region
from continuum_connector.worker.layout import Layout
from tests.fakes import FakeCopyEngine
from tests.vllm import kv_caches

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
NUM_LAYERS = 3
BLOCK_BYTES = NUM_LAYERS * FULL.page_size_bytes
ASKS_FOR_A_NAME = pytest.mark.skipif(not kv_caches.LAYOUTS, reason="vLLM <= 0.28")
ASKS_FOR_ONE_TENSOR = pytest.mark.skipif(bool(kv_caches.LAYOUTS), reason="vLLM >= 0.29")
NOT_ASKED = pytest.mark.parametrize(
    "extra", [{"dram_bytes": 0}, {"dram_bytes": "1MiB", "kv_layout": "stock"}]
)


def server(**extra: Any) -> Any:
    """Return what vLLM makes of `--kv-transfer-config` with our connector in it."""
    plugin.register()
    transfer = KVTransferConfig(
        kv_connector="ContinuumConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"dram_bytes": "1MiB", **extra},
    )
    return versions.vllm_config(block_size=16, transfer=transfer)


def layers(spec: Any = FULL) -> dict[str, Any]:
    return {f"layers.{i}": spec for i in range(NUM_LAYERS)}


def a_worker(config: Any, kv_cache_config: Any) -> Any:
    """Return the connector as vLLM makes it in a worker."""
    return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)


@dataclass
class Made(FakeCopyEngine):
    """What the native engine would have been made with."""

    paths = ("batch", "loop")

    def __call__(self, driver: str, layout: Any, num_slots: int, tuning: Any) -> Made:
        self.driver, self.layout = driver, layout
        self.slot_bytes, self.num_ready = layout.slot_bytes, num_slots
        return self


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    engine = Made()
    monkeypatch.setattr(native, "NativeEngine", engine)
    return engine


# vLLM >= 0.29 asks the connector's class for the name of a layout.


def resolve(config: Any) -> str:
    """The engine core's choice, where the attention backend can do with all layouts."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    return str(resolve_kv_cache_layout(config, [list(kv_caches.LAYOUTS)], [FULL]).name)


@ASKS_FOR_A_NAME
def test_with_a_tier_vllm_puts_the_block_outermost_and_a_block_is_one_region(made: Made) -> None:
    config = server()
    layout = resolve(config)
    assert layout == "BLHNC" != kv_caches.LAYOUTS[0]
    caches, kv_cache_config = kv_caches.build(config, layout, layers())
    a_worker(config, kv_cache_config).register_kv_caches(caches)
    [region] = made.layout.regions
    assert (region.dev_stride, region.num_bytes) == (BLOCK_BYTES, BLOCK_BYTES)


@ASKS_FOR_A_NAME
def test_a_kv_cache_that_sleep_moved_is_found_where_it_is(made: Made) -> None:
    config = server()
    caches, kv_cache_config = kv_caches.build(config, "BLHNC", layers())
    elsewhere, _ = kv_caches.build(config, "BLHNC", layers())
    connector = a_worker(config, kv_cache_config)
    connector.register_kv_caches(caches)
    connector.unregister_kv_caches()
    for name, tensor in elsewhere.items():
        caches[name].set_(tensor)
    connector.restore_kv_caches()
    connector.restore_kv_caches()
    [moved] = made.moved
    assert moved.regions[0].dev_base == min(each.data_ptr() for each in elsewhere.values())
    assert moved.regions[0].dev_base != made.layout.regions[0].dev_base


@ASKS_FOR_A_NAME
def test_layers_of_different_bytes_have_a_worker_with_all_their_bytes(made: Made) -> None:
    config, small = server(), replace(FULL, num_kv_heads=1)
    specs = {**layers(), "small": small}
    caches, kv_cache_config = kv_caches.build(config, "BLHNC", specs)
    assert hasattr(kv_cache_config.kv_cache_groups[0].kv_cache_spec, "kv_cache_specs")
    a_worker(config, kv_cache_config).register_kv_caches(caches)
    assert made.layout.slot_bytes == BLOCK_BYTES + small.page_size_bytes


@ASKS_FOR_A_NAME
def test_a_layout_named_by_the_operator_is_asked_for() -> None:
    assert resolve(server(kv_layout="BHLNC")) == "BHLNC"


@ASKS_FOR_A_NAME
@NOT_ASKED
def test_without_a_tier_or_as_stock_the_choice_is_vllms(extra: dict[str, Any]) -> None:
    assert resolve(server(**extra)) == kv_caches.LAYOUTS[0]


# vLLM <= 0.28 asks the connector whether it would have one tensor for all layers.


@pytest.fixture
def one_tensor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Do what GPUModelRunner.initialize_kv_cache does with the worker's connector; returns that
    tensor, or None where the layers get one each."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
    from vllm.v1.worker.utils import AttentionGroup

    def initialize(config: Any) -> torch.Tensor | None:
        spec = replace(FULL, indexes_kv_by_block_stride=True)  # so it does on a GPU
        with set_current_vllm_config(config):
            kv_cache_config = kv_caches.describe(config, layers(spec))
            connector = a_worker(config, kv_cache_config)
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
            groups = [[AttentionGroup(FlashAttentionBackend, list(layers()), spec, 0)]]
            if not KVConnectorModelRunnerMixin.use_uniform_kv_cache(groups):
                return None
            _, tensor, backend = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches(
                kv_cache_config, groups, "auto", torch.device("cpu"), [16]
            )
            connector.register_cross_layers_kv_cache(tensor, backend)
            return tensor

    return initialize


@ASKS_FOR_ONE_TENSOR
def test_with_a_tier_all_layers_share_a_tensor_and_a_block_is_one_region(
    one_tensor: Any, made: Made
) -> None:
    tensor = one_tensor(server())
    assert tensor is not None
    region = Region(tensor.data_ptr(), BLOCK_BYTES, 0, BLOCK_BYTES)
    assert made.layout.regions == (region,)
    assert made.layout.num_blocks == kv_caches.NUM_BLOCKS


@ASKS_FOR_ONE_TENSOR
@NOT_ASKED
def test_without_a_tier_or_as_stock_each_layer_has_its_tensor(
    one_tensor: Any, extra: dict[str, Any]
) -> None:
    assert one_tensor(server(**extra)) is None


# Who copies.


def start(device: str) -> None:
    config = SimpleNamespace(parallel_config=ParallelConfig(), scheduler_config=None)
    worker = build.worker(ContinuumConfig(dram_bytes=2**20), config)
    worker.register(Layout((Region(4096, 4096, 0, 4096),), 7, 4096, device, 0))


@pytest.mark.parametrize(("device", "copies"), [("cpu", "sim"), ("cuda", "cuda")])
def test_the_driver_is_that_of_the_kv_caches_device(device: str, copies: str, made: Made) -> None:
    start(device)
    assert made.driver == copies


def test_the_log_says_which_ways_of_copying_there_are(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="vllm.continuum_connector.build"):
        start("cpu")
    (line,) = caplog.messages
    assert line == "blocks are copied over sim by batch, loop"


# A disk below DRAM.

SMALL = replace(FULL, num_kv_heads=1, head_size=8)
DISK = {"disk_bytes": "8MiB"}


class Opened(Made):
    """And the file it was asked to open."""

    path, tuning = "", None

    def open_disk(self, path: str, tuning: Any) -> Any:
        self.path, self.tuning = path, tuning
        raise TransferError("seen enough")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    engine = Opened()
    monkeypatch.setattr(native, "NativeEngine", engine)
    return engine


def with_disk(path: Path, lora: Any = None) -> Any:
    """The worker of a server with a disk, and its report once the open has ended."""
    config = server(disk_path=str(path), **DISK)
    config.lora_config = lora
    caches, kv_cache_config = kv_caches.build(config, kv_caches.LAYOUTS[0], layers(SMALL))
    connector = a_worker(config, kv_cache_config)
    connector.register_kv_caches(caches)
    if of_rank := connector.worker._disk:
        of_rank._thread.join()
    connector.worker.poll()
    return connector.worker.take_report()


@ASKS_FOR_A_NAME
def test_with_a_disk_host_slots_are_whole_pages_and_each_rank_opens_its_file(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SLOT_BYTES", 10_000)
    report = with_disk(tmp_path / "disk")
    assert report.disk_down.startswith("seen enough")
    assert opened.path == str(tmp_path / "disk" / "dp0-rank0.slab")
    assert NUM_LAYERS * SMALL.page_size_bytes < opened.layout.slot_bytes == 4096
    assert opened.tuning.slot_blocks == 3
    assert opened.tuning.num_slots == (8 * 2**20 - 2**20) // (4 * 4096)
    assert '"hash"' in opened.tuning.facts


@ASKS_FOR_A_NAME
def test_a_server_that_may_have_no_disk_opens_none(opened: Opened, tmp_path: Path) -> None:
    report = with_disk(tmp_path / "disk", lora=object())
    assert (report.disk_down, opened.path) == ("", "")
    assert not (tmp_path / "disk").exists()
