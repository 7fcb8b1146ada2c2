"""What every test shares: this checkout's `bench` on the path of servers that tests start."""

from __future__ import annotations

import os
from pathlib import Path

REPO = str(Path(__file__).resolve().parents[1])
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if REPO not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([REPO, *filter(None, _paths)])
