"""What every test shares: its marks, and this checkout's `bench` for servers that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from continuum_connector.worker import folder

ROOT = Path(__file__).resolve().parent
# A run tells of the change it tests: what hypothesis draws is the same each time, and no clock
# decides. Looking for what nobody has drawn yet is the work of tests/vllm/long_machine.py.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

MARKS = {"vllm", "native", "server"}  # a folder of that name, wherever it lies

_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(ROOT) not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, _paths)])


def waits_for_test_all(item: pytest.Item) -> bool:
    """What `make test` leaves to `make test-all`: other vLLMs than the installed one, the C++ under
    sanitizers, the plan for a GPU, and servers with other flags than the one that most server tests
    share."""
    where = item.path.relative_to(ROOT).as_posix()
    uses = set(getattr(item, "fixturenames", ()))
    if where.startswith("tests/server/"):
        return "agents" not in uses or "server_factory" in uses
    if where.startswith("tests/versions/"):
        return "version" in uses
    return where in ("tests/native/test_sanitizers.py", "bench/tests/test_gpu_plan.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in MARKS.intersection(item.path.relative_to(ROOT).parts):
            item.add_marker(name)
        if waits_for_test_all(item):
            item.add_marker("full")
        if item.get_closest_marker("vllm"):
            for package in ("torch", "vllm", "transformers"):
                ignore = f"ignore::DeprecationWarning:{package}.*"
                item.add_marker(pytest.mark.filterwarnings(ignore))


@pytest.fixture(autouse=True)
def _any_drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's drive may be nearly full, and then there would be no disk tier."""
    if not request.node.get_closest_marker("min_left"):
        monkeypatch.setattr(folder, "MIN_LEFT", 0.0)
