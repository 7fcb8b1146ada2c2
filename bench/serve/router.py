"""vLLM's router with its program scheduling, in front of an arm's server while that arm runs.

Requests name their program in `X-Session-ID`: of what our agents could send, that is what the
router's key `auto` reads and stock vLLM answers (0.32 refuses its `agentic_context`, an object
in `vllm_xargs`, with 400).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

from bench.serve.server import ServerError, end_group, free_port, spawn, wait_for

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


class Router:
    """Its process, as a context manager. Entering waits until it answers for its servers."""

    def __init__(self, urls: Sequence[str], args: Sequence[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.start_timeout_s = 60.0
        self._process: Popen[bytes] | None = None
        self.command = [
            *(sys.executable, "-m", "vllm_router.launch_router"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-port", str(free_port())),
            *(*args, "--worker-urls", *urls),
        ]

    def __enter__(self) -> Router:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            log.write(os.fsencode(" ".join(self.command) + "\n"))
            log.flush()
            self._process = spawn(self.command, log)
        try:
            wait_for(self._process, self.url + "/health", self.start_timeout_s)
        except ServerError as error:
            self.stop()
            raise ServerError(f"the router {error}: {self.last_words()}") from None
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and all it started."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, grace_s=10.0)

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """The end of its log, and where that is."""
        last = "".join(self.log.read_text(errors="replace").splitlines()[-1:])
        return f"{last} (log: {self.log})"
