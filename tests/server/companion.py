"""Programs that run beside vLLM in a test: a router, a remote KV store."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.serve.server import LOGS, VllmServer, free_port
from tests.server.helpers import eventually

ROOT = Path(__file__).parents[2]
# LMCache pins older numpy, protobuf and OpenTelemetry than vLLM brings, and CUDA packages that
# a CPU has no use for: a folder of its own, without dependencies, leaves the environment alone.
LMCACHE = ("lmcache==0.5.6", "sortedcontainers==2.4.0", "opentelemetry-exporter-prometheus==0.66b2")
LMCACHE_DIR = ROOT / ".cache" / "lmcache-0.5.6"
LMCACHE_CHUNK = 32  # tokens; a multiple of the servers' block size


class UnavailableError(RuntimeError):
    """A package that a test runs beside vLLM could not be installed."""


@contextlib.contextmanager
def companion(
    name: str, command: Sequence[str], ready: str, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a command until the block is left; entering waits until `ready`, a URL, answers."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"test-{name}-{os.getpid()}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )

    def answers() -> bool:
        assert process.poll() is None, f"{name} ended: {log.read_text(errors='replace')[-2000:]}"
        with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=2):
            return True
        return False

    try:
        eventually(answers)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


@contextlib.contextmanager
def router(policy: str, worker_urls: Sequence[str], *args: str) -> Iterator[VllmServer]:
    """vLLM's router in front of these servers; asked as if it were one of them."""
    front = VllmServer(Path(), f"router-{policy}")
    front.port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", policy]
    command += ["--host", "127.0.0.1", "--port", str(front.port)]
    command += ["--prometheus-port", str(free_port()), *args, "--worker-urls", *worker_urls]
    with companion(front.name, command, f"{front.url}/health"):
        yield front


def install_lmcache() -> None:
    """Put LMCache into its folder; UnavailableError where it cannot be had. Safe to repeat."""
    if LMCACHE_DIR.exists():
        return
    scratch = LMCACHE_DIR.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--target", str(scratch), *LMCACHE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"LMCache cannot be installed: {done.stderr.strip()[-300:]}")
    scratch.rename(LMCACHE_DIR)


def lmcache_env() -> dict[str, str]:
    """What vLLM and LMCache's own server both need to know."""
    path = [str(LMCACHE_DIR), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",  # one name for a block in all processes
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }


@contextlib.contextmanager
def lmcache_server() -> Iterator[int]:
    """LMCache's store, a process of its own; the port that vLLM connects to."""
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server"]
    command += ["--host", "localhost", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
    command += ["--l1-size-gb", "1", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(LMCACHE_CHUNK), "--supported-transfer-mode", "auto"]
    with companion("lmcache", command, f"http://127.0.0.1:{http_port}/metrics", lmcache_env()):
        yield port
