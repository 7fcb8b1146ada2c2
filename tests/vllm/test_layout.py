"""Regions over the tensors that vLLM's own code allocates, and over shapes that name a rule.

The backends' own shapes, on each version: test_layout_backends.py.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.vllm.facts import Checkpoint, prover
from continuum_connector.worker.layout import all_layers, read_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM use what they deprecate as they are imported
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVQuantMode,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from tests.vllm.kv_caches import LAYOUTS, NUM_BLOCKS, build
    from tests.vllm.round_trip import check_round_trip, first_dim, second_dim

pytestmark = pytest.mark.vllm

FULL = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16, sliding_window=32
)
GEMMA = {f"layers.{i}": FULL if i % 6 == 5 else WINDOW for i in range(12)}


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    if not LAYOUTS:
        pytest.skip("vLLM <= 0.28 has no layouts to choose from")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VllmConfig()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize(
    ("layout", "num_regions"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 12), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)],
)
def test_loaded_bytes_equal_stored_bytes_in_every_layout(vllm_config, layout, num_regions):
    specs = {f"layers.{i}": FULL for i in range(3)}
    got = check_round_trip(lambda: build(vllm_config, layout, specs), first_dim())
    assert len(got.regions) == num_regions
    assert got.slot_bytes == 3 * FULL.page_size_bytes
    assert (got.num_blocks, got.device, got.device_index) == (NUM_BLOCKS, "cpu", 0)


@pytest.mark.parametrize(("layout", "num_regions"), [("LBHNC", 2), ("LBNHC", 2), ("BLHNC", 1)])
def test_groups_of_a_hybrid_model_share_one_set_of_regions(vllm_config, layout, num_regions):
    caches, config = build(vllm_config, layout, GEMMA)
    assert len(config.kv_cache_groups) == 6  # 2 layers each, on the same bytes
    assert len({tensor.data_ptr() for tensor in caches.values()}) == 2
    got = check_round_trip(lambda: build(vllm_config, layout, GEMMA), first_dim())
    assert len(got.regions) == num_regions
    assert got.slot_bytes == 2 * FULL.page_size_bytes


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_parallel_shards_have_regions_of_their_own_heads(vllm_config, layout, num_kv_heads):
    spec = replace(FULL, num_kv_heads=num_kv_heads)
    specs = {f"layers.{i}": spec for i in range(4)}
    got = check_round_trip(lambda: build(vllm_config, layout, specs), first_dim())
    assert got.slot_bytes == FULL.page_size_bytes * num_kv_heads


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_of_a_block_are_copied_together(vllm_config, layout):
    specs = {f"layers.{i}": replace(FULL, block_size=64) for i in range(2)}
    caches, _ = build(vllm_config, layout, specs, kernel_block_size=16)
    assert caches["layers.0"].shape[0] == 4 * NUM_BLOCKS
    got = check_round_trip(
        lambda: build(vllm_config, layout, specs, kernel_block_size=16), first_dim()
    )
    assert [region.num_bytes for region in got.regions] == [4 * FULL.page_size_bytes] * 2


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_padded_pages_are_copied_with_their_padding(vllm_config, layout):
    spec = replace(FULL, page_size_padded=FULL.page_size_bytes + 512)
    specs = {f"layers.{i}": spec for i in range(3)}
    got = check_round_trip(lambda: build(vllm_config, layout, specs), first_dim())
    assert got.slot_bytes == 3 * spec.page_size_bytes


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_layers_of_different_page_sizes(vllm_config, layout):
    small = replace(FULL, head_size=4, head_size_v=4)
    specs = {"layers.0": FULL, "layers.1": small, "layers.2": FULL}
    got = check_round_trip(lambda: build(vllm_config, layout, specs), first_dim())
    assert got.slot_bytes == 2 * FULL.page_size_bytes + small.page_size_bytes


def test_groups_whose_layers_overlay_each_other_unevenly(vllm_config):
    small = replace(WINDOW, head_size=4, head_size_v=4)
    groups = [
        KVCacheGroupSpec(["layers.0"], replace(FULL, num_kv_heads=8)),
        KVCacheGroupSpec(["layers.1", "layers.2", "layers.3"], small),
    ]
    got = check_round_trip(lambda: build(vllm_config, "BLHNC", groups=groups), first_dim())
    assert [region.num_bytes for region in got.regions] == [2 * FULL.page_size_bytes]


def test_latent_attention_with_one_head(vllm_config):
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    specs = {f"layers.{i}": spec for i in range(2)}
    check_round_trip(lambda: build(vllm_config, "LBNHC", specs), first_dim())


@pytest.mark.parametrize("num_blocks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_dimension_is_found_where_other_dimensions_have_its_size(
    vllm_config, layout, num_blocks
):
    specs = {f"layers.{i}": replace(FULL, num_kv_heads=16) for i in range(2)}
    check_round_trip(
        lambda: build(vllm_config, layout, specs, num_blocks=num_blocks),
        first_dim(num_blocks),
        num_blocks,
    )


# Shapes as before vLLM 0.29, made here: one tensor per layer, or one for all.


def old_config(num_layers: int, num_blocks: int, page_bytes: int, spec: Any = FULL) -> Any:
    names = [f"layers.{i}" for i in range(num_layers)]
    tensors = [SimpleNamespace(size=page_bytes * num_blocks, shared_by=[name]) for name in names]
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


def old_caches(shape: tuple[int, ...], permute: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Two layers of logical `shape`, `permute`d from the order in memory."""
    made = {}
    for name in ("layers.0", "layers.1"):
        order = permute or tuple(range(len(shape)))
        tensor = torch.zeros([shape[dim] for dim in order], dtype=torch.bfloat16)
        made[name] = tensor.permute([order.index(dim) for dim in range(len(shape))])
    return made


PAGE = FULL.page_size_bytes


@pytest.mark.parametrize("permute", [None, (0, 1, 3, 2, 4)])
@pytest.mark.parametrize("num_blocks", [4, 7, 16])
def test_old_key_value_pair_before_the_blocks_makes_two_regions_per_layer(num_blocks, permute):
    config = old_config(2, num_blocks, PAGE)
    got = check_round_trip(
        lambda: (old_caches((2, num_blocks, 16, 4, 8), permute), config),
        second_dim(num_blocks),
        num_blocks,
    )
    assert [region.num_bytes for region in got.regions] == [PAGE // 2] * 4


def test_old_key_value_pair_with_kernel_blocks():
    config = old_config(2, 5, 4 * PAGE)
    got = check_round_trip(lambda: (old_caches((2, 20, 16, 4, 8)), config), second_dim(5), 5)
    assert [region.num_bytes for region in got.regions] == [2 * PAGE] * 4


@pytest.mark.parametrize("num_blocks", [4, 7, 16])
def test_old_blocks_before_the_key_value_pair_make_one_region_per_layer(num_blocks):
    config = old_config(2, num_blocks, PAGE)
    got = check_round_trip(
        lambda: (old_caches((num_blocks, 2, 16, 4, 8), (0, 1, 3, 2, 4)), config),
        first_dim(num_blocks),
        num_blocks,
    )
    assert [region.num_bytes for region in got.regions] == [PAGE] * 2


def test_old_kernel_blocks_whose_neighbour_dimension_has_the_number_of_blocks():
    config = old_config(2, 16, 2 * PAGE)
    check_round_trip(lambda: (old_caches((32, 16, 4, 16)), config), first_dim(16), 16)


def test_old_layers_of_several_groups_on_one_tensor_are_counted_once():
    def make() -> tuple[dict[str, Any], Any]:
        caches = old_caches((2, 7, 16, 4, 8))
        config = old_config(2, 7, PAGE)
        for i in (0, 1):
            caches[f"other.{i}"] = caches[f"layers.{i}"]
            config.kv_cache_tensors[i].shared_by.append(f"other.{i}")
        return caches, config

    assert check_round_trip(make, second_dim(7), 7).slot_bytes == 2 * PAGE


def test_old_tensor_of_all_layers_is_one_region():
    config = old_config(3, 7, PAGE)

    def make() -> tuple[dict[str, Any], Any]:
        return all_layers(torch.zeros((7, 3, 4, 16, 16), dtype=torch.bfloat16), config), config

    got = check_round_trip(make, first_dim(7), 7)
    assert [region.num_bytes for region in got.regions] == [3 * PAGE]


def test_old_packed_cache_counts_the_block_it_names():
    config = old_config(2, 7, PAGE)
    for i, tensor in enumerate(config.kv_cache_tensors):
        tensor.offset, tensor.block_stride = i * PAGE, 2 * PAGE

    def make() -> tuple[dict[str, Any], Any]:
        packed = torch.zeros((7, 2, 4, 16, 16), dtype=torch.bfloat16)
        return {f"layers.{i}": packed[:, i] for i in range(2)}, config

    got = check_round_trip(make, first_dim(7), 7)
    assert [region.num_bytes for region in got.regions] == [2 * PAGE]


# Refused.


def refused(caches: dict[str, Any], config: Any, match: str) -> None:
    with pytest.raises(TransferError, match=match):
        read_layout(caches, config)


def test_kinds_of_blocks_that_nobody_has_proven_are_refused():
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16)
    config = old_config(2, 7, PAGE, spec)
    refused(old_caches((7, 2, 16, 4, 8)), config, "CrossAttentionSpec are not proven")


def test_what_is_no_tensor_is_refused():
    caches = {name: [{"state": t}] for name, t in old_caches((7, 2, 16, 4, 8)).items()}
    refused(caches, old_config(2, 7, PAGE), "has a dict, not a tensor")


def test_scales_of_unknown_place_are_refused():
    spec = replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    refused(old_caches((7, 2, 16, 4, 8)), old_config(2, 7, PAGE, spec), "FP8_PER_TOKEN_HEAD")


def test_groups_in_host_memory_are_refused():
    config = old_config(2, 7, PAGE)
    config.kv_cache_groups[0].host_resident = True
    refused(old_caches((7, 2, 16, 4, 8)), config, "already lies in DRAM")


def test_devices_without_a_driver_are_refused():
    caches = {name: t.to("meta") for name, t in old_caches((7, 2, 16, 4, 8)).items()}
    refused(caches, old_config(2, 7, PAGE), "'meta', which no driver copies from")


def test_padding_that_ends_behind_the_storage_is_refused():
    caches = {
        f"layers.{i}": torch.zeros(7 * PAGE // 2 - 64, dtype=torch.bfloat16).as_strided(
            (7, PAGE // 2 - 64), (PAGE // 2, 1)
        )
        for i in range(2)
    }
    refused(caches, old_config(2, 7, PAGE), f"{2 * PAGE - 256} bytes per block")


def test_tensors_on_two_devices_are_refused():
    caches = old_caches((7, 2, 16, 4, 8))
    caches["layers.1"] = caches["layers.1"].to("meta")
    refused(caches, old_config(2, 7, PAGE), "2 devices")


def test_no_tensors_are_refused():
    refused({}, old_config(2, 7, PAGE), "0 devices")


def test_a_layer_without_its_tensor_is_refused():
    caches = old_caches((7, 2, 16, 4, 8))
    del caches["layers.1"]
    refused(caches, old_config(2, 7, PAGE), r"no KV tensor for layer 'layers\.1'")


def test_bytes_that_differ_from_the_config_are_refused_with_both_numbers():
    refused(
        old_caches((7, 2, 16, 4, 8)),
        old_config(2, 7, PAGE + 256),
        rf"{2 * PAGE} bytes per block where vLLM's KVCacheConfig has {2 * PAGE + 512}",
    )


@pytest.mark.parametrize("shape", [(2, 2, 16, 4, 8), (2, 1, 16, 4, 8)])
def test_a_pair_that_could_be_the_blocks_is_refused(shape):
    refused(old_caches(shape), old_config(2, shape[1], PAGE), "2 dimensions that could be")


def test_a_shape_without_the_blocks_is_refused():
    refused(old_caches((2, 9, 16, 4, 8)), old_config(2, 7, PAGE), "0 dimensions that could be")


def test_a_stride_that_vllm_names_and_the_tensor_lacks_is_refused(vllm_config):
    caches, config = build(vllm_config, "LBNHC", {"layers.0": FULL})
    config.kv_cache_tensors[0].block_stride *= 2
    refused(caches, config, f"block stride of {2 * PAGE} bytes")


def test_strides_that_overlap_are_refused():
    caches = {
        name: tensor[:, :1].expand(-1, 2, -1, -1, -1)
        for name, tensor in old_caches((7, 2, 16, 4, 8)).items()
    }
    refused(caches, old_config(2, 7, PAGE), "overlap within a block")


def test_blocks_that_overlap_are_refused():
    whole = torch.zeros(7 * PAGE, dtype=torch.bfloat16)
    caches = {
        f"layers.{i}": whole.as_strided((7, PAGE // 2), (PAGE // 4, 1), i * PAGE * 3)
        for i in range(2)
    }
    refused(caches, old_config(2, 7, PAGE), "a block is above its stride")


def test_layers_that_share_bytes_at_different_strides_are_refused():
    whole = torch.zeros(14 * PAGE, dtype=torch.bfloat16)
    caches = {
        "layers.0": whole.as_strided((7, PAGE // 2), (PAGE // 2, 1), 0),
        "layers.1": whole.as_strided((7, PAGE // 2), (PAGE, 1), PAGE),
    }
    refused(caches, old_config(2, 7, PAGE), "different block strides")


@pytest.mark.parametrize("same_runs", [("LBHNC", "LBNHC"), ("BLHNC", "BLNHC", "BHLNC")])
def test_what_a_disk_holds_in_another_order_of_the_same_runs_is_another_models(
    vllm_config: VllmConfig, same_runs: tuple[str, ...]
) -> None:
    specs = {f"layers.{i}": FULL for i in range(3)}
    name = prover(dict, lambda: Checkpoint("nowhere", 0.0), "")

    def named(layout: str) -> bytes:
        found = read_layout(*build(vllm_config, layout, specs))
        with patch("secrets.token_hex", return_value=""):  # the weights, which are the same
            return name(found, lambda: False).digest

    assert len({named(layout) for layout in same_runs}) == len(same_runs)
    assert named(same_runs[0]) == named(same_runs[0])
