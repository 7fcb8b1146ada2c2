"""Regions over the caches of each attention backend, shaped by the backend and by vLLM's runners.

vLLM >= 0.29: a backend changes the layer's spec (`customize_spec`) and names the layouts that it
can do with; one function allocates. Before: a backend gives shape and stride order, and either of
two model runners makes the tensors of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

from bench.sim import versions
from tests.vllm import kv_caches
from tests.vllm.kv_caches import LAYOUTS, NUM_BLOCKS
from tests.vllm.round_trip import check_round_trip

# Without a GPU and its libraries these cannot be imported, so their own layouts are unread.
UNREAD = {
    *("FLASHINFER", "FLASHINFER_MLA", "TRITON_FLASHINFER"),  # flashinfer
    *("CUTLASS_MLA", "FLASH_ATTN_MLA", "ROCM_AITER_UNIFIED_ATTN"),  # kernels, a CUDA torch
    *("MINIMAX_M3_SPARSE", "STEP5_DSA"),  # torchvision
}
# No KV cache; or one of kinds and types that are not served (proven.py).
LEFT_OUT = {"NO_ATTENTION", "TORCH_SDPA", "CUSTOM", "TURBOQUANT", "ULTRAQUANT"}
INDEXER = "the indexer"


def _load() -> tuple[dict[str, Any], dict[str, str]]:
    """Each backend's class, or why it cannot be imported."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    found, why_not = {INDEXER: DeepseekV32IndexerBackend}, {}
    for name, member in AttentionBackendEnum.__members__.items():
        if name in LEFT_OUT or "DSV4" in name or not member.value:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = member.get_class()
        except (ImportError, AssertionError, AttributeError, RuntimeError) as error:
            why_not[name] = f"{type(error).__name__}: {error}"
    return found, why_not


BACKENDS, WHY_NOT = _load()


def test_the_backends_whose_layouts_are_unread_are_the_ones_named_here() -> None:
    assert set(WHY_NOT) <= UNREAD, WHY_NOT
    assert {INDEXER, "FLASH_ATTN", "TRITON_ATTN", "FLASHMLA", "ROCM_ATTN"} <= set(BACKENDS)


def kernel_size(backend: Any) -> int:
    """Tokens of a block that this backend's kernels take: the smallest that hold 16."""
    sizes = backend.get_supported_kernel_block_sizes()
    least = [size if isinstance(size, int) else size.base for size in sizes]
    return min((size if size >= 16 else 16) for size in least)


def spec_of(name: str, block_size: int, dtype: str = "auto") -> Any:
    """What a layer with this backend and --kv-cache-dtype asks for."""
    backend = BACKENDS[name]
    if name == INDEXER:
        return kv_caches.indexer_spec(block_size)
    common = {
        "block_size": block_size,
        "dtype": torch.bfloat16 if dtype == "auto" else torch.uint8,
        "kv_quant_mode": get_kv_quant_mode(dtype),
    }
    if backend.is_mla():
        spec = MLAAttentionSpec(**common, num_kv_heads=1, head_size=576, cache_dtype_str=dtype)
        if dtype == "fp8_ds_mla" and hasattr(spec, "state_content_bytes"):  # mla_attention.py
            spec = replace(spec, state_content_bytes=656)
    else:
        spec = FullAttentionSpec(**common, num_kv_heads=4, head_size=128, head_size_v=128)
        if "DIFFKV" in name:
            backend.set_head_size_v(64)
            spec = replace(spec, head_size_v=64)
    return backend.customize_spec(spec) if hasattr(backend, "customize_spec") else spec


def dtypes(name: str) -> list[str]:
    """Of --kv-cache-dtype, what this backend takes and a worker lets through."""
    if name == "FLASHINFER_MLA_SPARSE_SM120":  # whatever is asked
        return ["fp8_ds_mla"]
    can = BACKENDS[name].supported_kv_cache_dtypes
    return ["auto", *(dtype for dtype in ("fp8", "fp8_ds_mla") if dtype in can)]


def layouts(name: str) -> list[str]:
    if not LAYOUTS:
        return []
    can = BACKENDS[name].supported_kv_cache_layouts()
    return list(LAYOUTS) if can is None else [layout.name for layout in can]


MIXED_SIZES = [name for name in LAYOUTS if name not in ("LHBNC", "BHLNC")]  # vLLM refuses those
CASES = [(name, dtype) for name in BACKENDS for dtype in dtypes(name)]


@pytest.fixture
def config() -> Iterator[Any]:
    config = versions.vllm_config(block_size=16)
    with set_current_vllm_config(config):
        yield config


@pytest.mark.skipif(not LAYOUTS, reason="vLLM <= 0.28")
@pytest.mark.parametrize(
    ("name", "dtype", "layout"), [(*case, layout) for case in CASES for layout in layouts(case[0])]
)
def test_every_backend_in_every_layout_that_it_can_do_with(
    config: Any, name: str, dtype: str, layout: str
) -> None:
    size = kernel_size(BACKENDS[name])
    specs = {f"layers.{i}": spec_of(name, size, dtype) for i in range(3)}
    got = check_round_trip(lambda: kv_caches.build(config, layout, specs), first)
    assert got.slot_bytes == sum(spec.page_size_bytes for spec in specs.values())
    if layout.startswith("B"):
        assert len(got.regions) == 1


def first(tensor: Any, block: int) -> Any:
    return tensor.unflatten(0, (NUM_BLOCKS, -1))[block]


@pytest.mark.skipif(bool(LAYOUTS), reason="vLLM >= 0.29")
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("runner", ["one", "two"])
@pytest.mark.parametrize(("name", "dtype"), [] if LAYOUTS else CASES)
def test_every_backend_as_the_runners_before_0_29_make_its_tensors(
    config: Any, name: str, dtype: str, runner: str, order: str, kernel_blocks: int
) -> None:
    backend = BACKENDS[name]
    size = kernel_size(backend)
    spec = spec_of(name, size * kernel_blocks, dtype)
    layers = {f"layers.{i}": (backend, spec) for i in range(3)}
    got = check_round_trip(
        lambda: kv_caches.build_old(config, runner, order, layers, size, dtype),
        block_of(layers, size),
    )
    assert got.slot_bytes == 3 * spec.page_size_bytes


def block_of(layers: dict[str, Any], size: int) -> Any:
    """Find a block in the dimension where the backend itself says that blocks are."""
    backend, spec = next(iter(layers.values()))
    heads = spec.num_kv_heads, spec.head_size
    dim = backend.get_kv_cache_block_dim(size, *heads)
    return lambda tensor, b: tensor.unflatten(dim, (NUM_BLOCKS, -1)).select(dim, b)


# One group of layers that differ in bytes.


@pytest.mark.skipif(not LAYOUTS, reason="vLLM <= 0.28")
@pytest.mark.parametrize("layout", MIXED_SIZES)
def test_an_index_beside_the_latent(config: Any, layout: str) -> None:
    size = kernel_size(BACKENDS["FLASHMLA"])
    specs = {f"layers.{i}.mla": spec_of("FLASHMLA", size) for i in range(3)}
    specs |= {f"layers.{i}.index": spec_of(INDEXER, size) for i in range(3)}
    got = check_round_trip(lambda: kv_caches.build(config, layout, specs), first)
    assert got.slot_bytes == 3 * size * (576 * 2 + 132)


@pytest.mark.skipif(bool(LAYOUTS), reason="vLLM >= 0.29")
@pytest.mark.parametrize("runner", ["one", "two"])
def test_an_index_beside_the_latent_before_0_29(config: Any, runner: str) -> None:
    size = kernel_size(BACKENDS["FLASHMLA"])
    layers = {
        f"layers.{i}.{name}": (BACKENDS[name], spec_of(name, size))
        for i in range(3)
        for name in ("FLASHMLA", INDEXER)
    }
    got = check_round_trip(
        lambda: kv_caches.build_old(config, runner, "NHD", layers, size), block_of(layers, size)
    )
    assert got.slot_bytes == 3 * size * (576 * 2 + 132)
    assert len(got.regions) == 6
