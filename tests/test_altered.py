"""The altered connectors of tests/server reach into ours by name: who moves such a name sees it
here, before a server that takes one does not start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "tests/server/altered").glob("[!_]*.py"))


def test_what_they_alter_is_there() -> None:
    pytest.importorskip("vllm")
    assert NAMES
    lines = [f"from tests.server.altered import {name}" for name in NAMES]
    lines += [
        f"assert {name}.ContinuumConnector.__name__ == 'ContinuumConnector'" for name in NAMES
    ]
    env = {**os.environ, "TEST_FAULT_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
