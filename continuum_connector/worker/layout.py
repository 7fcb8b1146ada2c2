"""vLLM's KV tensors -> the regions that hold a block's bytes.

It assumes nothing from a layout's name: it reads strides back from the tensors, and refuses a cache
whose blocks it cannot prove to be exactly these bytes.

    tensors -> pieces (address and length of block 0's runs, and how far the next block's are)
            -> windows (pieces of one block that lie within one block stride, merged)
            -> regions, if their bytes equal those of vLLM's own KVCacheConfig

| layout | pieces per layer | regions |
|---|---|---|
| LBHNC, LBNHC; (num_blocks, 2, ...) | 1 | 1 per layer |
| LHBNC | 1 per head | 1 per layer and head |
| BLHNC, BLNHC; one tensor for all layers | 1 | 1 |
| BHLNC | 1 per head | 1 |
| (2, num_blocks, ...), vLLM <= 0.28 | K and V | 2 per layer |
| states: one tensor of bytes per layer; vLLM 0.26: a list of them | 1 per state | 1 per layer |

Groups of a hybrid model overlay the same bytes, and a block belongs to one group at a time, so
the union of all groups' pieces serves each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from continuum_connector.errors import TransferError
from continuum_connector.worker.abi import Region

if TYPE_CHECKING:
    import torch

# Classes of vLLM's specs whose blocks are proven to be the bytes between a tensor's strides.
# vllm/proven.py decides what a block means, and when it may be read again.
KINDS = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
    }
)
DISK_UNIT = 4096  # O_DIRECT takes whole units, at addresses that are multiples of it
# Beyond it, descriptors would cost more than bytes; no vLLM layout has so many.
_MAX_RUNS_PER_LAYER = 4096
_MAX_QUANT_MODE = 1  # vLLM's KVQuantMode: 0 none, 1 FP8 with scales beside the weights


@dataclass(frozen=True)
class Layout:
    """Where the bytes of every VRAM block lie, for one rank.

    `device` is "cuda" or "cpu". A host slot holds the regions' pieces back to back, then nothing up
    to `slot_bytes`. `order`: what those bytes are, layer by layer, which matters only to a process
    that reads what an earlier one wrote.
    """

    regions: tuple[Region, ...]
    num_blocks: int
    slot_bytes: int
    device: str
    device_index: int
    order: tuple[tuple[Any, ...], ...] = ()

    def padded(self) -> Layout:
        """The layout with slots of whole DISK_UNITs, so that a disk reads and writes them in
        place."""
        return replace(self, slot_bytes=padded(self.slot_bytes))


def padded(num_bytes: int) -> int:
    """The size rounded up to whole DISK_UNITs."""
    return -(-num_bytes // DISK_UNIT) * DISK_UNIT


@dataclass(frozen=True, order=True)
class _Storage:
    """One allocation. Its index, by first use, orders a slot's pieces; their addresses do not."""

    index: int
    end: int


@dataclass(frozen=True, order=True)
class _Piece:
    """A run of block 0; the same run of block b is `b * stride` further on. All in bytes."""

    storage: _Storage
    stride: int
    start: int
    num_bytes: int


@dataclass
class _Window:
    """Pieces of block 0 that lie within one stride, as disjoint (start, end) runs in order."""

    storage: _Storage
    stride: int
    runs: list[tuple[int, int]]

    @property
    def start(self) -> int:
        return self.runs[0][0]

    def end(self, num_blocks: int) -> int:
        return self.runs[-1][1] + (num_blocks - 1) * self.stride


def read_layout(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> Layout:
    """Derive the regions of what `register_kv_caches` gets; TransferError if not proven."""
    _check_specs(kv_cache_config)
    tensors = [(name, tensor) for name, cache in kv_caches.items() for tensor in _tensors(cache)]
    device, device_index = _check_tensors(tensors)
    num_blocks = int(kv_cache_config.num_blocks)
    strides = _known_strides(kv_cache_config)
    pieces: set[_Piece] = set()
    storages: dict[int, _Storage] = {}
    found: list[tuple[Any, ...]] = []
    for name, tensor in tensors:
        raw = tensor.untyped_storage()
        base = raw.data_ptr()
        storage = storages.setdefault(base, _Storage(len(storages), base + raw.nbytes()))
        dim = _block_dim(name, tensor, num_blocks, strides.get(name, 0))
        for start, run, stride in _pieces(name, tensor, dim, num_blocks):
            pieces.add(_Piece(storage, stride, start, run))
        found.append((storage, tensor.data_ptr(), _inside(name, tensor, dim, num_blocks)))
    windows = _windows(pieces)
    _check_windows(windows, num_blocks)
    want = _block_bytes(kv_caches, kv_cache_config)
    regions = _regions(windows, num_blocks, want)
    order = tuple(inside for *_, inside in sorted(found))
    return Layout(regions, num_blocks, want, device, device_index, order)


def all_layers(tensor: torch.Tensor, kv_cache_config: Any) -> dict[str, torch.Tensor]:
    """Give every layer's name the one tensor of `register_cross_layers_kv_cache` (<= 0.28)."""
    names = (name for spec in kv_cache_config.kv_cache_tensors for name in _layer_names(spec))
    return dict.fromkeys(names, tensor)


def _tensors(cache: Any) -> list[Any]:
    """A layer's tensors: one, or on vLLM 0.26 a list of its states."""
    return list(cache) if isinstance(cache, (list, tuple)) else [cache]


def _layer_names(tensor: Any) -> list[str]:
    """The layers of a KVCacheTensor: `layers` since vLLM 0.29, `shared_by` before."""
    return list(tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)


def _known_strides(config: Any) -> dict[str, int]:
    """The block stride that vLLM gives for each layer; before 0.29 only for packed caches."""
    known: dict[str, int] = {}
    for tensor in config.kv_cache_tensors:
        if stride := int(getattr(tensor, "block_stride", 0)):
            known.update(dict.fromkeys(_layer_names(tensor), stride))
    return known


def _block_bytes(kv_caches: Mapping[str, Any], config: Any) -> int:
    """The bytes of one block according to vLLM, with each storage counted once."""
    sizes: dict[tuple[int, int], int] = {}
    for index, tensor in enumerate(config.kv_cache_tensors):
        names = _layer_names(tensor)
        cache = next((kv_caches[name] for name in names if name in kv_caches), None)
        if cache is None:
            raise TransferError(f"vLLM gave no KV tensor for layer {names[0]!r}")
        # 0.29+: every tensor names the one allocation's size. Before: each its own, also where
        # all lie in one allocation; packed ones say the block's bytes instead.
        whole = hasattr(tensor, "layer_stride")
        packed = 0 if whole else int(getattr(tensor, "block_stride", 0))
        storage = _tensors(cache)[0].untyped_storage()
        key = storage.data_ptr(), -1 if whole or packed else index
        sizes[key] = packed * config.num_blocks or int(tensor.size)
    total = sum(sizes.values())
    if total == 0 or total % config.num_blocks:
        raise TransferError(
            f"the KV cache has {total} bytes, which {config.num_blocks} blocks do not divide"
        )
    return int(total // config.num_blocks)


def _check_specs(config: Any) -> None:
    """Refuse what a block copy may not restore: unknown kinds, scales elsewhere, host pools."""
    for group in config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for spec in inner.values() if inner else (group.kv_cache_spec,):
            kind = type(spec).__name__
            if kind not in KINDS:
                raise TransferError(f"layers of kind {kind} are not proven to be blocks of bytes")
            mode = getattr(spec, "kv_quant_mode", 0)
            if int(mode) > _MAX_QUANT_MODE:
                name = getattr(mode, "name", mode)
                raise TransferError(f"KV quantisation {name} keeps scales in places not known")
        if getattr(group, "host_resident", False):
            raise TransferError(f"the group of {group.layer_names[0]!r} already lies in DRAM")


def _check_tensors(tensors: Iterable[tuple[str, Any]]) -> tuple[str, int]:
    """Return the device that all tensors lie on."""
    devices = set()
    for name, tensor in tensors:
        if not hasattr(tensor, "untyped_storage"):
            raise TransferError(f"layer {name!r} has a {type(tensor).__name__}, not a tensor")
        devices.add((tensor.device.type, tensor.device.index or 0))
    if len(devices) != 1:
        raise TransferError(f"the KV cache lies on {len(devices)} devices, not on one")
    device, index = devices.pop()
    if device not in ("cpu", "cuda"):
        raise TransferError(f"the KV cache lies on {device!r}, which no driver copies from")
    return device, index


def _pieces(
    name: str, tensor: torch.Tensor, dim: int, num_blocks: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (address, length, block stride) of each contiguous run of one layer's block 0. `dim`:
    the dimension of the blocks."""
    item = tensor.element_size()
    kernel_blocks = tensor.shape[dim] // num_blocks
    stride = tensor.stride(dim) * item
    inner = [(size, step * item) for size, step in _beside(tensor, dim)]
    if kernel_blocks > 1:  # block b is kernel blocks b * k ... (b + 1) * k - 1
        inner.append((kernel_blocks, stride))
    run, offsets = _runs(name, item, inner)
    for offset in offsets:
        yield tensor.data_ptr() + offset, run, stride * kernel_blocks


def _beside(tensor: torch.Tensor, dim: int) -> list[tuple[int, int]]:
    """Size and stride, in elements, of every other dimension that has more than one element."""
    both = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [(size, step) for d, (size, step) in both if d != dim and size > 1]


def _inside(name: str, tensor: torch.Tensor, dim: int, num_blocks: int) -> tuple[Any, ...]:
    """How a layer's tensor lies within a block, whatever the number of blocks: two layouts may have
    the same runs, with heads before tokens or after. Of strides beyond a block, only the order
    counts."""
    steps = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    inner = [
        (size, sum(other < step for other in steps), step if step < tensor.stride(dim) else 0)
        for size, step in _beside(tensor, dim)
    ]
    return name, str(tensor.dtype), dim, tensor.shape[dim] // num_blocks, *inner


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int, known: int) -> int:
    """Find the dimension of the blocks: the first, or the second after a (K, V) pair.

    vLLM never puts anything else before it. If another dimension happens to have the same size,
    `known` decides: its stride, if vLLM gives it.
    """
    shape, item = tuple(tensor.shape), tensor.element_size()
    found = [d for d, size in enumerate(shape[:2]) if size and size % num_blocks == 0]
    if known:
        found = [d for d in found if tensor.stride(d) * item * (shape[d] // num_blocks) == known]
    if len(found) == 2 and shape[0] != 2:
        found = [0]
    if len(found) != 1:
        said = f" with a block stride of {known} bytes" if known else ""
        raise TransferError(
            f"layer {name!r} of shape {shape} has {len(found)} dimensions that could be its "
            f"{num_blocks} blocks{said}"
        )
    return found[0]


def _runs(name: str, item: int, inner: list[tuple[int, int]]) -> tuple[int, list[int]]:
    """Collapse (size, stride) dimensions to one run length and the offsets of the runs."""
    run = item
    rest: list[tuple[int, int]] = []
    for size, stride in sorted(inner, key=lambda dim: dim[1]):
        if stride == run and not rest:
            run *= size
        else:
            rest.append((size, stride))
    if math.prod(size for size, _ in rest) > _MAX_RUNS_PER_LAYER:
        raise TransferError(
            f"layer {name!r} has more than {_MAX_RUNS_PER_LAYER} separate runs in a block"
        )
    offsets, extent = [0], run
    for size, stride in rest:
        if stride < extent:
            raise TransferError(f"layer {name!r} has strides that overlap within a block")
        offsets = [i * stride + offset for i in range(size) for offset in offsets]
        extent += (size - 1) * stride
    return run, offsets


def _windows(pieces: Iterable[_Piece]) -> list[_Window]:
    """Merge pieces that lie within one stride of each other: they belong to the same block."""
    windows: list[_Window] = []
    for piece in sorted(pieces):
        end = piece.start + piece.num_bytes
        last = windows[-1] if windows else None
        if (
            last is None
            or (last.storage, last.stride) != (piece.storage, piece.stride)
            or end > last.start + last.stride
        ):
            windows.append(_Window(piece.storage, piece.stride, [(piece.start, end)]))
        elif piece.start > last.runs[-1][1]:
            last.runs.append((piece.start, end))
        else:  # adjacent to it, or another group's layer on the same bytes
            last.runs[-1] = (last.runs[-1][0], max(last.runs[-1][1], end))
    return sorted(windows, key=lambda window: (window.storage, window.start))


def _check_windows(windows: list[_Window], num_blocks: int) -> None:
    """Refuse blocks that share bytes with the next block, or with another window's blocks."""
    for window in windows:
        if window.end(1) - window.start > window.stride:
            raise TransferError("blocks of the KV cache overlap: a block is above its stride")
    for before, window in pairwise(windows):
        if before.storage == window.storage and before.end(num_blocks) > window.start:
            raise TransferError("layers of the KV cache overlap with different block strides")


def _regions(windows: list[_Window], num_blocks: int, want: int) -> tuple[Region, ...]:
    """Return regions whose sum is `want` bytes: the tensors' own, or else whole windows.

    A padded page is larger than its tensor. The gaps are copied, too, if the strides add up to
    vLLM's bytes per block, because then every byte of a window belongs to that block.
    """
    runs = [(start, end, window.stride) for window in windows for start, end in window.runs]
    have = sum(end - start for start, end, _ in runs)
    if have != want:
        fits = all(w.start + num_blocks * w.stride <= w.storage.end for w in windows)
        if not (fits and have < want == sum(w.stride for w in windows)):
            raise TransferError(
                f"the KV tensors hold {have} bytes per block where vLLM's KVCacheConfig has "
                f"{want}, so a stored block would be incomplete"
            )
        runs = [(w.start, w.start + w.stride, w.stride) for w in windows]
    regions, offset = [], 0
    for start, end, stride in runs:
        regions.append(Region(start, stride, offset, end - start))
        offset += end - start
    return tuple(regions)
