"""vLLM's router, as a process in front of servers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.serve.server import VllmServer, as_a_child, end_group, free_port
from tests.server.helpers import eventually

BINDS = {"program_scheduling_enable_key": "auto", "binding_only": True}
BINDING = ("--enable-program-scheduling", "--program-scheduling-config-json", json.dumps(BINDS))


@contextlib.contextmanager
def router(policy: str, worker_urls: Sequence[str], *args: str) -> Iterator[VllmServer]:
    """Run `vllm-router`; what is given back is asked as if it were one of the servers."""
    front = VllmServer(Path(), f"router-{policy}")
    front.port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", policy]
    command += ["--host", "127.0.0.1", "--port", str(front.port)]
    command += ["--prometheus-port", str(free_port()), *args, "--worker-urls", *worker_urls]
    front.log.parent.mkdir(parents=True, exist_ok=True)
    with front.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=as_a_child,
        )

    def answers() -> bool:
        assert process.poll() is None, f"the router ended:\n{front.log_tail()}"
        with contextlib.suppress(OSError):
            return front.get("/health", timeout_s=2.0) is not None
        return False

    try:
        eventually(answers)
        yield front
    finally:
        end_group(process, grace_s=10.0)
