"""vLLM's router, as a process in front of servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.serve.router import Router
from bench.serve.server import VllmServer

BINDS = {"program_scheduling_enable_key": "auto", "binding_only": True}
BINDING = ("--enable-program-scheduling", "--program-scheduling-config-json", json.dumps(BINDS))


@contextlib.contextmanager
def router(policy: str, worker_urls: Sequence[str], *args: str) -> Iterator[VllmServer]:
    """Run `vllm-router`; what is given back is asked as if it were one of the servers."""
    front = VllmServer(Path(), f"router-{policy}")
    with Router(worker_urls, ("--policy", policy, *args), front.log) as running:
        front.port = running.port
        yield front
