"""After a server with everything on has stopped, or was killed, nothing of ours is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.serve.server import VllmServer
from tests.server.conftest import DRAM_BYTES, MIDDLEWARE
from tests.server.helpers import ask, eventually, pids_of, pins_live, terminate, text_of

SHARED_MEMORY = Path("/dev/shm")


def killed(server: VllmServer) -> None:
    """kill -9 of all of it, as systemd and containers do. Of the API server alone would not do:
    vLLM's engine does not notice, with or without us."""
    pids = [*pids_of(server, "EngineCore"), *pids_of(server, "Worker")]
    assert len(pids) >= 2
    os.killpg(server.pid, signal.SIGKILL)
    eventually(lambda: not any(map(runs, pids)))


def runs(pid: int) -> bool:
    """Whether the process is there, and not only its entry, which its parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For what it puts into TMPDIR. Of a short name: a socket's path has room for 107 letters."""
    with TemporaryDirectory(prefix="left-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("ends", [terminate, killed])
def test_no_file_no_shared_memory_and_no_process_is_left(
    tiny_model: Path, tmp_path: Path, scratch: Path, ends: Callable[[VllmServer], None]
) -> None:
    before = set(os.listdir(SHARED_MEMORY))
    asked_for = {name: tmp_path / name for name in ("trace.jsonl", "switch")}
    with VllmServer(
        tiny_model,
        f"test-leftovers-{ends.__name__}",
        num_blocks=129,
        connector={
            "policy": "fixed_ttl",
            "ttl_s": 50,
            "dram_bytes": DRAM_BYTES,
            "trace_path": str(asked_for["trace.jsonl"]),
            "switch_path": str(asked_for["switch"]),
        },
        env={"TMPDIR": str(scratch)},
        args=MIDDLEWARE,
    ) as server:
        ask(server, "completions", [text_of(300, "left")], vllm_xargs={"job_id": "left"})
        eventually(lambda: pins_live(server) == 1)
        eventually(lambda: server.metric("continuum:dram_blocks", state="ready") > 0)
        ends(server)
        # vLLM's own, if it left some, are named psm_... and sem.mp-...
        eventually(lambda: not ours(set(os.listdir(SHARED_MEMORY)) - before))
        assert not ours({path.name for path in scratch.rglob("*")})
    found = {path.name for path in tmp_path.iterdir()}
    assert found <= set(asked_for)  # only what the config names
    assert "switch" not in found


def ours(names: set[str]) -> set[str]:
    return {name for name in names if "continuum" in name.lower() or "ckv" in name.lower()}
