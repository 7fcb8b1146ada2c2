"""The KV cache layout that the connector asks vLLM for, and where it asks for none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker import gpu_model_runner, utils
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.utils import AttentionGroup, prepare_kernel_block_sizes

from continuum_connector.connector import ContinuumConnector
from continuum_connector.vllm import compat
from tests.vllm import kv_caches
from tests.vllm.families import abridged, qwen3_next
from tests.vllm.test_worker_start import server

pytestmark = pytest.mark.skipif(not kv_caches.LAYOUTS, reason="vLLM <= 0.28")

STOCK = "LBNHC"
IS_AN_ERROR = not compat.maps_kernel_blocks()


def wish(config: Any) -> str | None:
    return ContinuumConnector.get_required_kvcache_layout(config)


def test_a_block_shall_be_one_run_where_blocks_will_be_copied() -> None:
    assert wish(server()) == "BLHNC"


def test_both_model_runners_place_blocks_by_the_layout_that_was_asked_for() -> None:
    """Otherwise the default one, V2, would leave a block in as many runs as there are layers."""
    placed = [runner.allocate_kv_cache for runner in (gpu_model_runner, attn_utils)]
    assert placed == [utils.allocate_kv_cache] * 2


def nothing(config: Any) -> None:
    pass


def no_prefix_caching(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False


def context_parallel(config: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def scales_elsewhere(config: Any) -> None:
    config.cache_config.cache_dtype = "nvfp4"


def stages_over_ray(config: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "ray"


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        (nothing, {"dram_bytes": 0}),
        (no_prefix_caching, {}),
        (context_parallel, {}),
        (scales_elsewhere, {}),
        (stages_over_ray, {}),
    ],
)
def test_nothing_is_asked_for_where_nothing_will_be_copied(
    change: Any, extra: dict[str, Any]
) -> None:
    config = server(**extra)
    change(config)
    assert wish(config) is None


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of a model with states."""
    config = server()
    monkeypatch.setattr(type(config.model_config), "is_hybrid", property(lambda self: True))
    with set_current_vllm_config(config):
        yield config


class FixedKernels:
    """An attention backend whose kernels take blocks of these sizes only, as FlashInfer's do."""

    SIZES = (16, 32, 64)

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int]:
        return list(cls.SIZES)


def kernel_size(config: Any, layout: str) -> int:
    """Allocate the caches of Qwen3-Next; return the tokens of a block that its attention gets."""
    config.cache_config.kv_cache_layout = layout
    found = kv_caches.describe(config, abridged(qwen3_next(), 2), 3)
    groups = found.kv_cache_groups
    of = [
        [AttentionGroup(FixedKernels, group.layer_names, group.kv_cache_spec, index)]
        for index, group in enumerate(groups)
    ]
    sizes = prepare_kernel_block_sizes(found, of)
    which = kv_caches.KVCacheLayout[layout]
    kv_caches.allocate_kv_cache(found, torch.device("cpu"), which, sizes)
    [size] = [
        size
        for size, group in zip(sizes, groups, strict=True)
        if not isinstance(group.kv_cache_spec, MambaSpec)
    ]
    return size


def test_a_model_with_states_keeps_blocks_that_its_kernels_can_split(hybrid: Any) -> None:
    assert wish(hybrid) is None
    assert kernel_size(hybrid, STOCK) in FixedKernels.SIZES


def test_blocks_that_lie_outermost_are_not_split(hybrid: Any) -> None:
    """Why not: vLLM 0.29 ends, and later ones leave the splitting to each group's block table."""
    if IS_AN_ERROR:
        with pytest.raises(ValueError, match="cannot be split"):
            kernel_size(hybrid, "BLHNC")
    else:
        assert kernel_size(hybrid, "BLHNC") == 544


@pytest.mark.parametrize(("block_size", "is_wanted"), [(64, True), (128, not IS_AN_ERROR)])
def test_large_blocks_that_a_user_asks_for_do_not_end_the_server(
    block_size: int, is_wanted: bool
) -> None:
    config = server()
    config.cache_config.block_size = block_size
    assert wish(config) == ("BLHNC" if is_wanted else None)


def test_what_the_operator_names_is_asked_for_all_the_same(hybrid: Any) -> None:
    ours = hybrid.kv_transfer_config.kv_connector_extra_config
    ours["kv_layout"] = "BLNHC"
    assert wish(hybrid) == "BLNHC"
