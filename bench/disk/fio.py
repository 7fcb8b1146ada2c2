"""The rival: fio over io_uring, the same bytes in the same pieces, around the page cache."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench.disk.rig import GB, LIMIT_S, Sample, Shape

# Where a container's rules forbid io_uring, the older way of asking for many at once.
ENGINES = ("io_uring", "libaio")


class Fio:
    """fio with a file of its own, for one shape; `engine` is what it asks the system by."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        """Writes the file as a whole; RuntimeError, with fio's words, if it cannot."""
        self.path = folder / f"fio-{shape.slot_bytes}.bin"
        self._shape = shape
        words = ""
        for engine in ENGINES:
            self.engine = engine
            try:
                self._run(writes=True)
            except RuntimeError as error:
                words = str(error)
            else:
                return
        self.close()
        raise RuntimeError(words)

    def sample(self) -> Sample:
        """Move all of the file once, in no order."""
        job = self._run(self._shape.writes)
        moved = job["write" if self._shape.writes else "read"]
        seconds = moved["runtime"] / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        num_gb = moved["io_bytes"] / GB
        return Sample(num_gb / seconds, cpu_s * 1e3 / num_gb)

    def _run(self, writes: bool) -> dict[str, Any]:
        shape = self._shape
        size = shape.num_orders * shape.depth * shape.slot_bytes
        done = subprocess.run(
            [
                *("fio", "--name=rival", f"--filename={self.path}", "--direct=1", "--thread"),
                *(f"--rw={'randwrite' if writes else 'randread'}", f"--bs={shape.slot_bytes}"),
                *(f"--iodepth={shape.depth}", f"--ioengine={self.engine}", f"--size={size}"),
                *("--norandommap=0", "--output-format=json", "--fallocate=native"),
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            words = (done.stderr or done.stdout).strip().splitlines()
            raise RuntimeError(words[-1] if words else f"fio ended with {done.returncode}")
        [job] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        if job["error"]:
            raise RuntimeError(f"fio's job ended with error {job['error']}")
        return dict(job)

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def is_here() -> bool:
    """Whether there is a fio to compare with."""
    return shutil.which("fio") is not None
