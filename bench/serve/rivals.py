"""LMCache beside vLLM: its packages in a folder of their own, its server while an arm runs.

python -m bench.serve.rivals        # installs it there (pip, a few packages, no dependencies)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.cache import CACHE
from bench.cli import start, teaching_parser
from bench.serve import package
from bench.serve.server import Companion, free_port

FOLDER = CACHE / "rivals"
PACKAGES = (
    "lmcache==0.5.6",
    "sortedcontainers==2.4.0",
    "opentelemetry-exporter-prometheus==0.66b2",
    *("aiofile==3.12.3", "caio==0.12.10"),  # of the connector in process
)
CUDA = "13x"
ON_GPU = (f"cupy-cuda{CUDA}==14.2.0",)  # maps the engine's KV cache into LMCache's server
LMCACHE_ENV = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONHASHSEED": "0",  # engine and server must hash alike
}
SHM = Path("/dev/shm")
TEACH = f"""It goes into {FOLDER},
without dependencies: LMCache's metadata pins older versions of packages that vLLM brings, and none
of those pins is needed. Where vLLM is built for GPUs, cupy comes with it. Another LMCache may be
used from another folder: continuum bench ab --rivals."""


def packages(on_cpu: bool) -> tuple[str, ...]:
    """What LMCache needs beside this vLLM."""
    return PACKAGES if on_cpu else (*PACKAGES, *ON_GPU)


def missing(folder: Path, on_cpu: bool) -> list[str]:
    """What of it is not there, in whatever version: a run writes down which it had.

    cupy may be of another CUDA, as that LMCache is.
    """
    names = (each.partition("==")[0].replace(CUDA, "*") for each in packages(on_cpu))
    found = ((name, folder.glob(f"{name.replace('-', '_')}-*.dist-info")) for name in names)
    return [name for name, paths in found if not any(paths)]


def install(folder: Path = FOLDER) -> None:
    """Install the pinned packages into `folder`; raises if pip fails."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), *packages(package.on_cpu())], check=True)


class LmcacheServer(Companion):
    """LMCache's server process."""

    def __init__(self, dram_bytes: int, chunk: int, on_cpu: bool, env: dict[str, str]) -> None:
        self.port = free_port()
        http_port = free_port()
        self._shm = f"lmcache_bench_{os.getpid()}_{self.port}"
        command = [
            *(sys.executable, "-m", "lmcache.v1.multiprocess.http_server"),
            *("--host", "localhost", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
            *("--l1-size-gb", f"{dram_bytes / 2**30:.9f}", "--eviction-policy", "LRU"),
            *("--chunk-size", str(chunk), "--supported-transfer-mode", "auto"),
        ]
        url = f"http://127.0.0.1:{http_port}/metrics"
        # Page-locking much memory takes a while.
        super().__init__("LMCache's server", command, url, 180.0, Path(os.devnull))
        self.env = env
        if on_cpu:  # else bytes go through a socket
            self.command += ["--shm-name", self._shm]

    def add_disk(self, folder: Path, num_bytes: int) -> None:
        """Have it keep what DRAM has in files there too, the least recently used leaving."""
        disk = {"type": "fs_native", "base_path": str(folder)}
        room = {"max_capacity_gb": num_bytes / 2**30, "eviction": {"eviction_policy": "LRU"}}
        self.command += ["--l2-adapter", json.dumps({**disk, **room})]

    def stop(self) -> None:
        """End it and take its shared memory away: a killed server leaves it behind."""
        super().stop()
        (SHM / f"lmcache_l1_pool_{self._shm}").unlink(missing_ok=True)


def main() -> None:
    """Install; `--help` only tells."""
    teaching_parser(
        "python -m bench.serve.rivals", "Install LMCache for its arms.", TEACH
    ).parse_args()
    install()


if __name__ == "__main__":
    start(main, "python -m bench.serve.rivals")
