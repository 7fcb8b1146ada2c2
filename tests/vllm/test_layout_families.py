"""Groups, sizes and regions of real models' KV caches, as vLLM itself groups and places them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

from bench.sim import versions
from continuum_connector.errors import TransferError
from continuum_connector.vllm import proven, served
from continuum_connector.worker import layout
from tests.vllm import kv_caches
from tests.vllm.families import BF16, FAMILIES, FP32, Family, abridged, deepseek_v4, llama4, state
from tests.vllm.families import full as full_attention
from tests.vllm.kv_caches import LAYOUTS
from tests.vllm.round_trip import check_round_trip, first_dim
from tests.vllm.test_layout_backends import BACKENDS

BLOCKS = 3
NAMES = {family.name: family for family in FAMILIES}
STATES = ["Qwen3-Next", "Nemotron-3-Nano", "Kimi-Linear"]
PACKING = [name for name in LAYOUTS if name in ("BLHNC", "BLNHC")]


@pytest.fixture
def config() -> Iterator[Any]:
    config = versions.vllm_config(block_size=16)
    if LAYOUTS:
        config.cache_config.kv_cache_layout = "LBNHC"
    with set_current_vllm_config(config):
        yield config


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_the_groups_blocks_and_bytes_that_the_documents_say(
    config: Any, family: Family
) -> None:
    found = kv_caches.describe(config, family.layers(), BLOCKS)
    assert [len(group.layer_names) for group in found.kv_cache_groups] == family.groups
    assert {g.kv_cache_spec.block_size for g in found.kv_cache_groups} == {family.block_size}
    assert served.bytes_per_block(found) == family.block_bytes


def test_v4_has_groups_of_four_block_sizes_in_one_packed_block(config: Any) -> None:
    if LAYOUTS:
        config.cache_config.kv_cache_layout = "BLHNC"
    found = kv_caches.describe(config, deepseek_v4(), BLOCKS)
    sizes = [group.kv_cache_spec.block_size for group in found.kv_cache_groups]
    assert sizes == [256, 64, 64, 4, 8]
    assert served.bytes_per_block(found) == V4_BYTES


V4_BYTES = 1_480_320


@pytest.mark.parametrize("name", ["LBNHC", "BLHNC"])
@pytest.mark.skipif(not LAYOUTS, reason="vLLM <= 0.28")
def test_chunks_have_groups_of_their_own_where_the_hybrid_manager_is_on(
    config: Any, name: str
) -> None:
    found = kv_caches.describe(config, llama4(), BLOCKS)
    assert [len(group.layer_names) for group in found.kv_cache_groups] == [12] * 4
    check(config, name, abridged(llama4(), 2))


def check(config: Any, name: str, layers: dict[str, Any]) -> layout.Layout:
    """Move blocks of these layers there and back; every byte of a layer's block arrives."""
    found = kv_caches.build(config, name, layers, num_blocks=BLOCKS)[1]
    got = check_round_trip(
        lambda: kv_caches.build(config, name, layers, num_blocks=BLOCKS), first_dim(BLOCKS), BLOCKS
    )
    assert got.slot_bytes == served.bytes_per_block(found)
    return got


@pytest.mark.skipif(not LAYOUTS, reason="vLLM <= 0.28")
@pytest.mark.parametrize("name", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("family", STATES)
def test_states_of_real_models_come_back_byte_for_byte(config: Any, family: str, name: str) -> None:
    got = check(config, name, abridged(NAMES[family].layers(), 1))
    assert len(got.regions) == 1


@pytest.mark.skipif(not LAYOUTS, reason="vLLM <= 0.28")
@pytest.mark.parametrize(("num_states", "num_full"), [(6, 4), (4, 6), (9, 3), (3, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_of_states_lie_on_those_of_attention_in_every_layout(
    config: Any, name: str, num_states: int, num_full: int
) -> None:
    """More layers of states than of attention in a group: the pad of some is nobody's page."""
    layers = small(num_states, num_full)
    if name != HEADS_FIRST:
        got = check(config, name, layers)
        assert len(got.regions) == (1 if name.startswith("B") else got.slot_bytes // PAGE)
        return
    caches, found = kv_caches.build(config, name, layers, num_blocks=BLOCKS)
    with pytest.raises(TransferError, match="different block strides"):
        layout.read_layout(caches, found)


HEADS_FIRST = "LHBNC"  # a head's blocks lie between those of another: a state's bytes are not one's
PAGE = full_attention(32, 2, 64).page_size_bytes


def small(num_states: int, num_full: int) -> dict[str, Any]:
    padded = state(32, PAGE, ((3, 64), BF16), ((PAGE // 4 - 128,), FP32))
    specs = [padded] * num_states + [full_attention(32, 2, 64)] * num_full
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


@pytest.mark.skipif(not LAYOUTS, reason="vLLM <= 0.28")
@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize("layers", [deepseek_v4, NAMES["MiniMax M3"].layers])
def test_layers_of_several_page_sizes_are_one_region_where_blocks_are_outermost(
    config: Any, layers: Any, name: str
) -> None:
    assert len(check(config, name, abridged(layers(), 2)).regions) == 1


@pytest.mark.skipif(bool(LAYOUTS), reason="vLLM >= 0.29")
@pytest.mark.parametrize("runner", ["one", "two"])
@pytest.mark.parametrize("family", STATES)
def test_states_before_0_29_come_back_byte_for_byte(config: Any, family: str, runner: str) -> None:
    layers = abridged(NAMES[family].layers(), 1)
    of = {name: (_backend(spec), spec) for name, spec in layers.items()}
    kernel = 64 if family == "Kimi-Linear" else 16

    def make() -> Any:
        return kv_caches.build_old(config, runner, "NHD", of, kernel, num_blocks=BLOCKS)

    got = check_round_trip(make, _block(of, kernel), BLOCKS)
    assert got.slot_bytes == served.bytes_per_block(make()[1])


def _backend(spec: Any) -> Any:
    return BACKENDS["FLASHMLA" if isinstance(spec, MLAAttentionSpec) else "FLASH_ATTN"]


def _block(layers: dict[str, Any], kernel: int) -> Any:
    """A block of a state lies in the first dimension, one of attention where its backend says."""

    def block(tensor: Any, number: int) -> Any:
        for backend, spec in layers.values():
            if not isinstance(spec, MambaSpec):
                dim = backend.get_kv_cache_block_dim(kernel, spec.num_kv_heads, spec.head_size)
                if tensor.shape[dim] > BLOCKS:
                    return tensor.unflatten(dim, (BLOCKS, -1)).select(dim, number)
        return tensor[number]

    return block


def test_what_is_served_is_proven_to_be_bytes() -> None:
    assert set(proven.KINDS) <= layout.KINDS
