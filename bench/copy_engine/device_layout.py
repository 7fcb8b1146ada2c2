"""What a block in one piece costs attention: it reads each layer's KV of many blocks, and with our
layout those lie a whole block apart."""

from __future__ import annotations

import statistics

import numpy as np

from bench.copy_engine.machine import Machine, Pages
from bench.copy_engine.report import Say, Section, size, spread
from bench.copy_engine.sizes import Sizes

LAYOUTS = {"a layer in one piece": False, "a block in one piece": True}


def measure_layout(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """All layers of all blocks, one after the other, in shuffled order: as a step that decodes."""
    piece, layers = sizes.page_piece, sizes.page_layers
    section = Section(
        "layout",
        f"Reading {size(sizes.page_bytes)} of KV, {layers} layers in pieces of {size(piece)}, ms",
        ("layout", "median", "p99", "max", "GB/s", "slow-down"),
        note="Layers one after the other, each of all blocks in shuffled order; what is read is "
        "written to one place. Slow-down: by that of the first row in the same turn, its median. "
        "With pages of 2 MiB in VRAM a layer of the second lies in as many pages as there are "
        "blocks, of the first in a few.",
    )
    num_blocks = max(2, sizes.page_bytes // (piece * layers))
    order = np.random.default_rng(7).permutation(num_blocks)
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for turn in range(1 + sizes.repeats):  # the first warms up
        for name, block_first in LAYOUTS.items():
            say(f"layout, {name}, turn {turn} of {sizes.repeats}")
            pages = machine.pages(num_blocks, layers, piece, block_first)
            seconds = _read(machine, pages, order, layers)
            if turn:
                found[name].append(seconds)
            del pages  # two pools need not fit
    first = found[next(iter(LAYOUTS))]
    for name, times in found.items():
        ratios = [one / other for one, other in zip(times, first, strict=True)]
        rate = num_blocks * layers * piece / statistics.median(times) / 1e9
        cells = (f"{rate:.0f}", f"{statistics.median(ratios):.3f}")
        section.rows.append((name, *spread([1e3 * each for each in times]), *cells))
        section.samples[name] = times
    return section


def _read(machine: Machine, pages: Pages, order: np.ndarray, layers: int) -> float:
    """Seconds for all layers, once they have been read before."""
    stream = machine.stream()
    read = pages.reader(stream, order)
    for layer in range(layers):
        read(layer)
    begun = stream.record()
    for layer in range(layers):
        read(layer)
    ended = stream.record()
    stream.synchronize()
    return float(ended.seconds_since(begun))
