"""What every test shares: marks by folder, and this checkout's `bench` for servers tests start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
MARKS = {"vllm", "native", "server"}  # a folder of that name, wherever it lies

_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(ROOT) not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, _paths)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in MARKS.intersection(item.path.relative_to(ROOT).parts):
            item.add_marker(name)
        if item.get_closest_marker("vllm"):
            for package in ("torch", "vllm", "transformers"):
                ignore = f"ignore::DeprecationWarning:{package}.*"
                item.add_marker(pytest.mark.filterwarnings(ignore))
