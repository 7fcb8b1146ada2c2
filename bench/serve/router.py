"""vLLM's router with its program scheduling, in front of an arm's server while that arm runs.

Requests name their program in `X-Session-ID`: of what our agents could send, that is what the
router's key `auto` reads and stock vLLM answers (0.32 refuses its `agentic_context`, an object
in `vllm_xargs`, with 400).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.serve.server import Companion, free_port

PACKAGE = "vllm-router==0.1.17"
LOG = "router.log"
HEADER = "X-Session-ID"


def installed() -> bool:
    """Whether the Python that would start it has it."""
    return importlib.util.find_spec("vllm_router") is not None


def scheduling(num_tokens: int) -> tuple[str, ...]:
    """Options: programs are admitted into so many tokens of a server's KV."""
    config = {
        "program_scheduling_enable_key": "auto",
        "token_capacity_per_dp_rank": num_tokens,
    }
    return (
        *("--enable-program-scheduling", "--program-scheduling-config-json"),
        json.dumps(config),
    )


class Router(Companion):
    """Its process. `urls`: the servers behind it."""

    def __init__(self, urls: Sequence[str], args: Sequence[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            *(sys.executable, "-m", "vllm_router.launch_router"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-port", str(free_port())),
            *(*args, "--worker-urls", *urls),
        ]
        super().__init__("the router", command, f"{self.url}/health", 60.0, log)
