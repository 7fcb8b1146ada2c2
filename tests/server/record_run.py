"""How bench/tests/vllm/recorded/run.jsonl was made: agents on a real server, its trace kept.

    python -m tests.server.record_run bench/tests/vllm/recorded/run.jsonl

On a machine that is otherwise idle: bench/tests/vllm/test_lab_replay.py expects the lab, with
turns as short as a CPU's, to decide as this server did, and gaps are far from the TTL for that
reason.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from bench.serve.server import VllmServer
from bench.serve.tiny_model import LLAMA, make_model
from tests.server.helpers import ask, eventually, in_flight, terminate, text_of

NUM_BLOCKS = 57  # of 32 tokens: two programs in the end, of five
NUM_SLOTS = 160
TTL_S = 3.0
# Programs start a second apart. Gaps before each turn: well within the TTL, or well beyond it.
GAPS = {
    "p0": (0.0, 0.5, 0.5, 6.0),
    "p1": (1.0, 0.5, 6.0, 0.5),
    "p2": (2.0, 6.0, 0.5, 0.5),
    "p3": (3.0, 0.5, 0.5, 0.5),
    "p4": (4.0, 6.0, 6.0, 0.5),
}
TASK, TOOL, ANSWER = 380, 150, 12  # tokens


def agent(server: VllmServer, name: str) -> None:
    """One program: a completion per turn, each prompt the last one, its answer and more."""
    history: list[str] = []
    for number, gap_s in enumerate(GAPS[name]):
        time.sleep(gap_s)  # the tool, not a wait for the server
        history.append(text_of(TASK if not number else TOOL, f"{name} {number}"))
        is_final = number == len(GAPS[name]) - 1
        says = {"continuum": {"program": name, "final": is_final}}
        answer = ask(
            server, "completions", history, ANSWER, kv_transfer_params=says, ignore_eos=True
        )
        history.append(answer["choices"][0]["text"])


def record(path: Path) -> None:
    """Serve, let the agents run, keep the trace."""
    path.unlink(missing_ok=True)
    connector = {
        "policy": "fixed_ttl",
        "ttl_s": TTL_S,
        "dram_bytes": NUM_SLOTS * 32 * LLAMA.kv_bytes_per_token(),
        "trace_path": str(path.resolve()),
    }
    args = ("--shutdown-timeout", "60")
    with VllmServer(
        make_model(), "record", num_blocks=NUM_BLOCKS, connector=connector, args=args
    ) as server:
        threads = [threading.Thread(target=agent, args=(server, name)) for name in GAPS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: in_flight(server) == 0)
        terminate(server)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
