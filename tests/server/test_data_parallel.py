"""Two engines of one server share `dram_bytes`: a server of two that takes it twice is killed."""

from __future__ import annotations

from pathlib import Path

from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA
from tests.server.conftest import ServerFactory
from tests.server.helpers import (
    BLOCK,
    by_label,
    eventually,
    find_mapping,
    in_flight,
    pids_of,
    tokens_of,
)

NUM_ENGINES = 2
SLOT_BYTES = BLOCK * LLAMA.kv_bytes_per_token()
NUM_SLOTS = 131  # of each engine; an odd number, so that its pool is known by its length
DRAM_BYTES = NUM_ENGINES * NUM_SLOTS * SLOT_BYTES
NUM_PROMPTS, NUM_BLOCKS = 10, 30  # to each engine: more blocks than all of DRAM has slots


def test_two_engines_of_a_dense_model_fill_one_dram_bytes_and_no_more(
    server_factory: ServerFactory,
) -> None:
    pair = server_factory(
        "pair",
        num_blocks=101,
        connector={"policy": "lru_offload", "dram_bytes": DRAM_BYTES},
        args=("--data-parallel-size", str(NUM_ENGINES), "--api-server-count", "1"),
        start_timeout_s=900.0,  # of two engines, and a coordinator before them
    )
    workers = pids_of(pair, "Worker")
    assert len(workers) == NUM_ENGINES
    before = [resident(pid) for pid in workers]
    for engine in range(NUM_ENGINES):
        fill(pair, engine)
    evicted = by_label(pair.metrics(), "continuum:dram_evicted_blocks_total", "engine")
    assert all(evicted[str(engine)] > 0 for engine in range(NUM_ENGINES)), "DRAM is not full"
    grown = sum(resident(pid) for pid in workers) - sum(before)
    print(f"\ndram_bytes {DRAM_BYTES}: both workers grew by {grown} bytes")
    slots = by_label(pair.metrics(), "continuum:dram_capacity_blocks", "engine")
    assert slots == {"0": NUM_SLOTS, "1": NUM_SLOTS}
    pools = [pool_bytes(pid, NUM_SLOTS * SLOT_BYTES) for pid in workers]
    assert 0.95 * DRAM_BYTES < sum(pools) <= DRAM_BYTES, pools


def fill(server: VllmServer, engine: int) -> None:
    """Have one engine store more blocks than `dram_bytes` of the whole server has slots."""
    for seed in range(NUM_PROMPTS):
        body = {
            "model": SERVED_NAME,
            "prompt": tokens_of(NUM_BLOCKS * BLOCK, f"{engine} {seed}"),
            "max_tokens": 1,
        }
        server.post("/v1/completions", body, {"X-data-parallel-rank": str(engine)})
        eventually(lambda: in_flight(server) == 0)


def resident(pid: int) -> int:
    """Bytes of DRAM that the process has."""
    return _field(Path(f"/proc/{pid}/status").read_text(), "VmRSS:")


def pool_bytes(pid: int, num_bytes: int) -> int:
    """Bytes of DRAM in the process's host pool, a mapping of this length."""
    start = find_mapping(pid, num_bytes)
    smaps = Path(f"/proc/{pid}/smaps").read_text()
    return _field(smaps[smaps.index(f"{start:x}-") :], "Rss:")


def _field(text: str, name: str) -> int:
    kib = next(line for line in text.splitlines() if line.startswith(name)).split()[1]
    return int(kib) * 1024
