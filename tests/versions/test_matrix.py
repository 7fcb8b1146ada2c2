"""The scheduler side on the Python sources of every supported vLLM: one subprocess each.

A subprocess, because a process can import one vLLM; several at a time, because each spends
most of its time on one core. What it runs is tests/vllm as it stands, less LEFT_OUT.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.versions import sources

pytestmark = [pytest.mark.vllm]

# What the lab finds out: that takes minutes and is asked once. Each version is asked if it runs.
LEFT_OUT = ("test_matrix_fast.py", "test_lab_simulate.py")
TIMEOUT_S = 900


@dataclass
class Run:
    """What pytest said over one version."""

    fetched: str
    returncode: int
    output: str
    seconds: float

    @property
    def summary(self) -> str:
        lines = [line.strip("= ") for line in self.output.strip().splitlines()]
        return lines[-1] if lines else "no output"


def run_version(version: str) -> Run:
    """Run tests/vllm with `import vllm` being `version`."""
    fetched = sources.fetch(version)
    path = [str(sources.source_dir(version)), str(sources.ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_CACHE_ROOT": str(sources.CACHE / f"{version}.run"),
        "VLLM_TARGET_DEVICE": "cpu",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/vllm",
        "-m",
        "vllm and not native and not gpu",
    ]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", "--tb=short", "--color=no"]
    command += [f"--ignore=tests/vllm/{name}" for name in LEFT_OUT]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=sources.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Run(fetched, done.returncode, done.stdout + done.stderr, time.monotonic() - began)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """Start every selected version at once, on as many cores as there are."""
    chosen = [
        item.callspec.params["version"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_scheduler_side
    ]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as executor:
        yield {version: executor.submit(run_version, version) for version in chosen}


@pytest.mark.parametrize("version", sources.VERSIONS)
def test_scheduler_side(
    version: str, runs: dict[str, Future[Run]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    try:
        run = runs[version].result()
    except sources.SourcesUnavailableError as error:
        pytest.skip(str(error))
    with capsys.disabled():
        print(f"\n{run.fetched}; tests/vllm: {run.summary}", end=" ")
    imported = re.search(r"^vllm: (\S+) from (.*)$", run.output, re.MULTILINE)
    assert imported, run.output[-4000:]
    assert imported[1] == version
    assert imported[2].startswith(str(sources.source_dir(version)))
    assert run.returncode == 0, run.output[-20_000:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on import
def test_what_is_run_is_what_is_promised() -> None:
    pytest.importorskip("vllm")
    from continuum_connector.vllm.compat import SUPPORTED

    assert tuple(release for release, _ in SUPPORTED) == sources.VERSIONS
    for name in ("README.md", "docs/limits.md"):
        text = (sources.ROOT / name).read_text()
        assert all(release in text for release in sources.VERSIONS), name
