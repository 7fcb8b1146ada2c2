"""How long a server's start asks vLLM for the names that we touch (continuum_connector/vllm).

python -m bench.hook_cost.probe
"""

from __future__ import annotations

import time

import vllm.v1.core.sched.scheduler  # noqa: F401  a server has imported it by then

from bench.cli import start
from continuum_connector.vllm import touched
from continuum_connector.vllm.touched import TOUCHED


def main() -> int:
    """Each time anew, as in a process that has just started."""
    took = []
    for _ in range(5):
        touched.missing.cache_clear()
        touched._stored_by.cache_clear()
        began = time.process_time()
        lacking = touched.missing()
        took.append((time.process_time() - began) * 1e3)
    asked = f"{len(TOUCHED)} names of {touched.release()}, of which {len(lacking)} are missing"
    print(f"{asked}: {took[0]:.0f} ms of CPU at first, then {min(took):.0f} (aim: 50)")
    return 0


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.probe")
