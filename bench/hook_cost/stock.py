"""What the shadow of stock vLLM costs a turn, in CPU time. Run from the repository root:

python -m bench.hook_cost.stock
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from bench.cli import positive, start, teaching_parser
from continuum_connector.scheduler.stock import StockCache

BLOCK, NUM_COMMON, NUM_NEW = 16, 60, 12  # tokens; blocks that all begin with, and that a turn adds
NUM_PROGRAMS, NUM_RUNNING, NUM_TURNS = 64, 30, 3000


class Tables:
    """Every running turn has computed its whole prompt."""

    def __init__(self) -> None:
        self.blocks: dict[str, Sequence[bytes]] = {}

    def num_blocks(self) -> int:
        return sum(map(len, self.blocks.values()))

    def num_blocks_of(self, request_id: str) -> int:
        return len(self.blocks.get(request_id, ()))

    num_cached_of = num_blocks_of


def measure(num_blocks: int) -> list[float]:
    """Microseconds of each turn's admission and of another turn's end; a VRAM of 40 contexts."""
    tables = Tables()
    cache = StockCache(40 * num_blocks, BLOCK, tables)
    common = _hashes(NUM_COMMON)
    chains = [common + _hashes(num_blocks - NUM_COMMON) for _ in range(NUM_PROGRAMS)]
    running: deque[SimpleNamespace] = deque()
    times = []
    for turn in range(NUM_TURNS):
        chain = chains[turn % NUM_PROGRAMS]
        del chain[num_blocks:]
        chain += _hashes(NUM_NEW)
        hashes = [bytes(bytearray(each)) for each in chain]  # as each request hashes them anew
        request = SimpleNamespace(
            request_id=str(turn),
            block_hashes=hashes,
            num_tokens=len(hashes) * BLOCK + 1,
            skip_reading_prefix_cache=False,
        )
        tables.blocks[request.request_id] = hashes
        running.append(request)
        began = time.thread_time()
        cache.admitted(request, 0)
        if len(running) > NUM_RUNNING:
            cache.finished(running[0])
        times.append((time.thread_time() - began) * 1e6)
        if len(running) > NUM_RUNNING:
            del tables.blocks[running.popleft().request_id]
    return times[NUM_TURNS // 5 :]


def _hashes(number: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(number)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = teaching_parser("python -m bench.hook_cost.stock", __doc__.splitlines()[0])
    parser.add_argument("--blocks", type=positive, nargs="+", default=[512], help="of a context")
    print("| blocks of a context | P25, us | median, us | P90, us |\n|---|---|---|---|")
    for num_blocks in parser.parse_args(arguments).blocks:
        times = np.quantile(measure(num_blocks), [0.25, 0.5, 0.9])
        print(f"| {num_blocks:,} | {' | '.join(f'{each:.0f}' for each in times)} |")
    return 0


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.stock")
