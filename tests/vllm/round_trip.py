"""A block, stored from one KV cache and loaded to another through our regions, byte for byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from continuum_connector.worker.layout import Layout, read_layout
from tests.vllm.kv_caches import NUM_BLOCKS

Block = Callable[
    [Any, int], Any
]  # a layer's tensor, a block's number -> that block as vLLM sees it


def first_dim(num_blocks: int = NUM_BLOCKS) -> Block:
    return lambda tensor, block: tensor.unflatten(0, (num_blocks, -1))[block]


def bytes_of(tensor: Any) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def randomise(caches: dict[str, Any]) -> None:
    for tensor in flat(caches).values():
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


def flat(caches: dict[str, Any]) -> dict[str, Any]:
    """Each tensor by a name: on vLLM 0.26 a layer of states has a list of them."""
    found = {}
    for name, cache in caches.items():
        several = cache if isinstance(cache, list) else [cache]
        found |= {f"{name}.{i}": tensor for i, tensor in enumerate(several)}
    return found


def copy(layout: Layout, block: int, slot: Any, store: bool) -> None:
    for region in layout.regions:
        host = ctypes.addressof(slot) + region.host_offset
        device = region.dev_base + block * region.dev_stride
        to, source = (host, device) if store else (device, host)
        ctypes.memmove(to, source, region.num_bytes)


def check_round_trip(
    make: Callable[[], tuple[dict[str, Any], Any]], block_of: Block, num_blocks: int = NUM_BLOCKS
) -> Layout:
    """Store a block of one cache, load it to a block of another, compare every layer's bytes."""
    (source, config), (target, _) = make(), make()
    randomise(source)
    randomise(target)
    reading, writing = read_layout(source, config), read_layout(target, config)
    source, target = flat(source), flat(target)
    offset = 0
    for region in reading.regions:  # the pieces fill a slot back to back
        assert region.host_offset == offset
        offset += region.num_bytes
    assert offset == reading.slot_bytes
    ends = (0, num_blocks - 1)
    for block, other in (ends, ends[::-1], (1 % num_blocks, 2 % num_blocks)):
        before = {
            (name, b): bytes_of(block_of(tensor, b))
            for name, tensor in target.items()
            for b in range(num_blocks)
        }
        slot = ctypes.create_string_buffer(reading.slot_bytes)
        copy(reading, block, slot, store=True)
        copy(writing, other, slot, store=False)
        for (name, b), old in before.items():
            want = bytes_of(block_of(source[name], block)) if b == other else old
            assert bytes_of(block_of(target[name], b)) == want, (name, b)
    return reading


def second_dim(num_blocks: int) -> Block:
    return lambda tensor, block: tensor.unflatten(1, (num_blocks, -1))[:, block]
